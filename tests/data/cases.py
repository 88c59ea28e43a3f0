"""What the tests of the stream share."""


def rows_by_sample(batches):
    """Return {global sample number: row of tokens}; a number that comes twice is an error."""
    found = {}
    for batch in batches:
        for sample, row in zip(batch["samples"].tolist(), batch["tokens"], strict=True):
            assert sample not in found
            found[sample] = row.tolist()
    return found
