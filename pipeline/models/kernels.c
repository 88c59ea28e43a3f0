/* Small operations of a loop over time, each in one pass over its rows; see kernels.py.

   The file includes itself once for each dtype. Rows are shared among threads in equal parts, and what is summed over
   rows has one sum a thread, so that results depend on the number of threads alone. */

#ifndef REAL

#include <math.h>
#include <stdint.h>
#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif
#define LEAST 8192 /* elements below which a second thread costs more than it saves */
#define MOST_HEAD 1024
#define UNSEEN -1000 /* its exponential is 0 */
#define LANES 32 /* columns of a sum of rows that stay in registers */
#define BLOCK 64 /* columns of a product whose sums stay in registers, for four rows */
#define PRAGMA(x) _Pragma(#x)
#define ROWS(count, width) PRAGMA(omp parallel for schedule(static) num_threads(threads) if ((count) * (width) > LEAST))

/* Attention of some positions to slots of buffers. Keys and values of the positions themselves, where they are the
   layer's own, are written to their slots first.

   x: [rows, n, heads], and kv_heads twice if own, all of them [width]; w: of QK-norm, [heads and kv_heads if own,
   width], or one for all with step 0, or null; cos, sin: [rows or 1, n, width]; mask: bytes [rows or 1, n, slots seen],
   or null; keys, values and their gradients: [rows, kv_heads, slots, width]; factors: [rows, n, heads and kv_heads if
   own]; scaled: [rows, kv_heads, group, n, width]; weights, scores: [rows, kv_heads, group, n, slots seen]; out,
   gradient: [rows, n, heads, width]; sums: [threads, and as w]. Heads are kv_heads groups. Slots are seen from first to
   stop; the positions' own begin at begin. The fields' order is that of `kernels.Attention`. */
struct Attention {
    int64_t rows, n, kv_heads, group, width, own, slots, first, near, begin, stop, causal, again, threads;
    int64_t head_step, table_row_step, table_step, mask_row_step, mask_step;
    double least;
    const void *x, *w, *cos, *sin, *mask;
    void *keys, *values, *factors, *scaled, *weights, *out;
    const void *gradient;
    void *of_keys, *of_values, *scores, *of_x, *sums;
};

#define REAL float
#define NAME(f) f##_float
#define SQRT sqrtf
#define EXP expf
#include "kernels.c"
#undef REAL
#undef NAME
#undef SQRT
#undef EXP

#define REAL double
#define NAME(f) f##_double
#define SQRT sqrt
#define EXP exp
#include "kernels.c"

#else

/* y += factor x. */
static void NAME(add)(REAL *y, const REAL *x, REAL factor, int64_t width) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) y[i] += factor * x[i];
}

/* y = x f w with f = 1 / sqrt(|x|^2 + least), by row. x, y: [rows, width]; w: [width]; f: [rows]. */
void NAME(norm)(const REAL *x, const REAL *w, REAL *y, REAL *f, int64_t rows, int64_t width, double least,
                int threads) {
    ROWS(rows, width)
    for (int64_t row = 0; row < rows; ++row) {
        const REAL *from = x + row * width;
        REAL *to = y + row * width, square = 0;
#pragma omp simd reduction(+ : square)
        for (int64_t i = 0; i < width; ++i) square += from[i] * from[i];
        const REAL factor = f[row] = 1 / SQRT(square + (REAL)least);
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) to[i] = from[i] * factor * w[i];
    }
}

/* Gradient of a row x of `norm`, given g, that of its y; adds g x factor to sum [width]. */
static void NAME(norm_row_back)(const REAL *x, const REAL *w, REAL factor, const REAL *g, REAL *of_x, REAL *sum,
                                int64_t width) {
    REAL along = 0;
#pragma omp simd reduction(+ : along)
    for (int64_t i = 0; i < width; ++i) {
        const REAL product = g[i] * x[i] * factor;
        sum[i] += product;
        along += product * w[i];
    }
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) of_x[i] = (g[i] * w[i] - x[i] * factor * along) * factor;
}

/* Gradient of x, given g, that of y; adds g x f to sums [threads, width]. */
void NAME(norm_back)(const REAL *x, const REAL *w, const REAL *f, const REAL *g, REAL *of_x, REAL *sums, int64_t rows,
                     int64_t width, int threads) {
    ROWS(rows, width)
    for (int64_t row = 0; row < rows; ++row) {
        NAME(norm_row_back)(x + row * width, w, f[row], g + row * width, of_x + row * width, sums + THREAD * width, width);
    }
}

/* y = x w for few rows. x: [rows, height]; w: [height, width]; y: [rows, width]. */
void NAME(multiply)(const REAL *x, const REAL *w, REAL *y, int64_t rows, int64_t height, int64_t width, int threads) {
    const int64_t blocks = (width + BLOCK - 1) / BLOCK;
    ROWS(rows * height, width / 16)
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t begin = block * BLOCK, count = width - begin < BLOCK ? width - begin : BLOCK;
        for (int64_t row = 0; row < rows; row += 4) {
            const REAL *from = x + row * height;
            const int64_t some = rows - row < 4 ? rows - row : 4;
            REAL sums[4][BLOCK] = {{0}};
            if (some == 4 && count == BLOCK)
                for (int64_t k = 0; k < height; ++k) {
                    const REAL *weight = w + k * width + begin;
                    const REAL a = from[k], b = from[height + k], c = from[2 * height + k], d = from[3 * height + k];
#pragma omp simd
                    for (int64_t i = 0; i < BLOCK; ++i) {
                        sums[0][i] += a * weight[i];
                        sums[1][i] += b * weight[i];
                        sums[2][i] += c * weight[i];
                        sums[3][i] += d * weight[i];
                    }
                }
            else
                for (int64_t k = 0; k < height; ++k)
                    for (int64_t j = 0; j < some; ++j) NAME(add)(sums[j], w + k * width + begin, from[j * height + k], count);
            for (int64_t j = 0; j < some; ++j)
                for (int64_t i = 0; i < count; ++i) y[(row + j) * width + begin + i] = sums[j][i];
        }
    }
}

/* y = silu(gate) up for x = [gate, up]. x: [rows, 2 width]; y: [rows, width]. */
void NAME(swiglu)(const REAL *x, REAL *y, int64_t rows, int64_t width, int threads) {
    ROWS(rows, width)
    for (int64_t row = 0; row < rows; ++row) {
        const REAL *gate = x + 2 * row * width, *up = gate + width;
        REAL *to = y + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) to[i] = gate[i] / (1 + EXP(-gate[i])) * up[i];
    }
}

/* Gradient of x, given g, that of y. */
void NAME(swiglu_back)(const REAL *x, const REAL *g, REAL *of_x, int64_t rows, int64_t width, int threads) {
    ROWS(rows, width)
    for (int64_t row = 0; row < rows; ++row) {
        const REAL *gate = x + 2 * row * width, *up = gate + width, *grad = g + row * width;
        REAL *of_gate = of_x + 2 * row * width, *of_up = of_gate + width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            const REAL open = 1 / (1 + EXP(-gate[i])), silu = gate[i] * open;
            of_up[i] = grad[i] * silu;
            of_gate[i] = grad[i] * up[i] * (open + silu * (1 - open));
        }
    }
}

/* The norm of a head, times w where there is one, turned by the angle of a table, times scale; returns f. */
static REAL NAME(turn)(const REAL *x, const REAL *w, const REAL *cos, const REAL *sin, REAL *y, int64_t width,
                       REAL least, REAL scale) {
    const int64_t half = width / 2;
    REAL normed[MOST_HEAD], factor = 1;
    if (w) {
        REAL square = 0;
#pragma omp simd reduction(+ : square)
        for (int64_t i = 0; i < width; ++i) square += x[i] * x[i];
        factor = 1 / SQRT(square + least);
    }
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) normed[i] = x[i] * (factor * scale) * (w ? w[i] : 1);
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        y[i] = normed[i] * cos[i] - normed[i + half] * sin[i];
        y[i + half] = normed[i + half] * cos[i + half] + normed[i] * sin[i + half];
    }
    return factor;
}

/* Gradient of the x of `turn`, given g, that of y over scale; adds to sum, that of w. */
static void NAME(turn_back)(const REAL *x, const REAL *w, const REAL *cos, const REAL *sin, REAL factor, const REAL *g,
                            REAL *of_x, REAL *sum, int64_t width, REAL scale) {
    const int64_t half = width / 2;
    REAL back[MOST_HEAD];
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        back[i] = (g[i] * cos[i] + g[i + half] * sin[i + half]) * scale;
        back[i + half] = (g[i + half] * cos[i + half] - g[i] * sin[i]) * scale;
    }
    if (!w) {
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) of_x[i] = back[i];
        return;
    }
    NAME(norm_row_back)(x, w, factor, back, of_x, sum, width);
}

static REAL NAME(dot)(const REAL *x, const REAL *y, int64_t width) {
    REAL sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; ++i) sum += x[i] * y[i];
    return sum;
}

/* y = weights rows. weights: [count]; rows: [count, width]. */
static void NAME(weigh)(const REAL *weights, const REAL *rows, REAL *y, int64_t count, int64_t width) {
    int64_t begin = 0;
    for (; begin + LANES <= width; begin += LANES) {
        REAL sums[LANES] = {0};
        for (int64_t m = 0; m < count; ++m)
#pragma omp simd
            for (int64_t i = 0; i < LANES; ++i) sums[i] += weights[m] * rows[m * width + begin + i];
        for (int64_t i = 0; i < LANES; ++i) y[begin + i] = sums[i];
    }
    for (int64_t i = begin; i < width; ++i) y[i] = 0;
    for (int64_t m = 0; m < count && begin < width; ++m)
        NAME(add)(y + begin, rows + m * width + begin, weights[m], width - begin);
}

/* Attention weights of query i of a row, scaled, for keys from the first slot on. What is unseen has weight 0. */
static void NAME(look)(const struct Attention *a, int64_t row, int64_t i, const REAL *query, const REAL *keys,
                       REAL *weights) {
    const int64_t count = a->stop - a->first, width = a->width, seen = a->causal ? i + 1 : count;
    const uint8_t *mask = a->mask ? (const uint8_t *)a->mask + row * a->mask_row_step + i * a->mask_step : 0;
    REAL most = 0, sum = 0;
    int any = 0;
    for (int64_t m = 0; m < seen; ++m) weights[m] = NAME(dot)(query, keys + m * width, width);
    for (int64_t m = 0; m < seen; ++m)
        if ((!mask || mask[m]) && (!any || weights[m] > most)) most = weights[m], any = 1;
#pragma omp simd
    for (int64_t m = 0; m < seen; ++m) weights[m] -= most;
    for (int64_t m = 0; mask && m < seen; ++m)
        if (!mask[m]) weights[m] = UNSEEN;
#pragma omp simd reduction(+ : sum)
    for (int64_t m = 0; m < seen; ++m) {
        const REAL grown = EXP(weights[m]);
        weights[m] = grown;
        sum += grown;
    }
    for (int64_t m = seen; m < count; ++m) weights[m] = 0;
#pragma omp simd
    for (int64_t m = 0; m < seen; ++m) weights[m] /= sum;
}

/* Attention from the packed projection to what the output projection reads. */
void NAME(attend)(const struct Attention *a) {
    const int64_t n = a->n, width = a->width, heads = a->kv_heads * a->group, count = a->stop - a->first;
    const int64_t packed = heads + (a->own ? 2 * a->kv_heads : 0), turned = heads + (a->own ? a->kv_heads : 0);
    const REAL *cos = a->cos, *sin = a->sin, *w = a->w, scale = 1 / SQRT((REAL)width);
    const int threads = a->threads;
    ROWS(a->rows * heads * n, width * count)
    for (int64_t both = 0; both < a->rows * a->kv_heads; ++both) {
        const int64_t row = both / a->kv_heads, head = both % a->kv_heads;
        REAL *keys = (REAL *)a->keys + both * a->slots * width, *values = (REAL *)a->values + both * a->slots * width;
        for (int64_t i = 0; i < n && a->own; ++i) {
            const REAL *from = (const REAL *)a->x + (row * n + i) * packed * width, *key = from + (heads + head) * width;
            const int64_t table = row * a->table_row_step + i * a->table_step, slot = (a->begin + i) * width;
            ((REAL *)a->factors)[(row * n + i) * turned + heads + head] =
                NAME(turn)(key, w ? w + (heads + head) * a->head_step : 0, cos + table, sin + table, keys + slot, width,
                           (REAL)a->least, 1);
            for (int64_t j = 0; j < width; ++j) values[slot + j] = key[a->kv_heads * width + j];
        }
        for (int64_t i = 0; i < n; ++i)
            for (int64_t g = 0; g < a->group; ++g) {
                const int64_t table = row * a->table_row_step + i * a->table_step, own = head * a->group + g;
                const int64_t query = (both * a->group + g) * n + i;
                REAL *scaled = (REAL *)a->scaled + query * width, *weights = (REAL *)a->weights + query * count;
                REAL *out = (REAL *)a->out + ((row * n + i) * heads + own) * width;
                ((REAL *)a->factors)[(row * n + i) * turned + own] =
                    NAME(turn)((const REAL *)a->x + ((row * n + i) * packed + own) * width,
                               w ? w + own * a->head_step : 0, cos + table, sin + table, scaled, width, (REAL)a->least,
                               scale);
                NAME(look)(a, row, i, scaled, keys + a->first * width, weights);
                NAME(weigh)(weights, values + a->first * width, out, count, width);
            }
    }
}

/* Gradient of x, given that of out; adds to those of keys and values from slot `near` on, and writes scores, the
   gradients of what softmax was taken of. */
void NAME(attend_back)(const struct Attention *a) {
    const int64_t n = a->n, width = a->width, heads = a->kv_heads * a->group, count = a->stop - a->first;
    const int64_t packed = heads + (a->own ? 2 * a->kv_heads : 0), turned = heads + (a->own ? a->kv_heads : 0);
    const int64_t summed = a->head_step ? turned : 1, near = a->near - a->first;
    const REAL *cos = a->cos, *sin = a->sin, *w = a->w, scale = 1 / SQRT((REAL)width);
    const int threads = a->threads;
    ROWS(a->rows * heads * n, width * count)
    for (int64_t both = 0; both < a->rows * a->kv_heads; ++both) {
        const int64_t row = both / a->kv_heads, head = both % a->kv_heads, begin = both * a->slots * width;
        const REAL *keys = (const REAL *)a->keys + begin, *values = (const REAL *)a->values + begin;
        REAL *of_keys = (REAL *)a->of_keys + begin, *of_values = (REAL *)a->of_values + begin, of_query[MOST_HEAD];
        REAL *sums = w ? (REAL *)a->sums + THREAD * summed * width : 0;
        for (int64_t i = 0; i < n; ++i)
            for (int64_t g = 0; g < a->group; ++g) {
                const int64_t table = row * a->table_row_step + i * a->table_step, own = head * a->group + g;
                const int64_t query = (both * a->group + g) * n + i, at = ((row * n + i) * packed + own) * width;
                const REAL *scaled = (const REAL *)a->scaled + query * width;
                const REAL *grad = (const REAL *)a->gradient + ((row * n + i) * heads + own) * width;
                REAL *weights = (REAL *)a->weights + query * count, *scores = (REAL *)a->scores + query * count, mean = 0;
                if (a->again) NAME(look)(a, row, i, scaled, keys + a->first * width, weights);
                for (int64_t m = 0; m < count; ++m) {
                    scores[m] = NAME(dot)(grad, values + (a->first + m) * width, width);
                    mean += weights[m] * scores[m];
                }
                for (int64_t m = 0; m < count; ++m) scores[m] = weights[m] * (scores[m] - mean);
                NAME(weigh)(scores, keys + a->first * width, of_query, count, width);
                for (int64_t m = near; m < count; ++m) {
                    NAME(add)(of_keys + (a->first + m) * width, scaled, scores[m], width);
                    NAME(add)(of_values + (a->first + m) * width, grad, weights[m], width);
                }
                NAME(turn_back)((const REAL *)a->x + at, w ? w + own * a->head_step : 0, cos + table, sin + table,
                                ((const REAL *)a->factors)[(row * n + i) * turned + own], of_query,
                                (REAL *)a->of_x + at, w ? sums + own * a->head_step : 0, width, scale);
            }
        for (int64_t i = 0; i < n && a->own; ++i) {
            const int64_t table = row * a->table_row_step + i * a->table_step, slot = (a->begin + i) * width;
            const int64_t at = ((row * n + i) * packed + heads + head) * width;
            const int64_t key = (heads + head) * a->head_step;
            REAL *of_value = (REAL *)a->of_x + at + a->kv_heads * width;
            NAME(turn_back)((const REAL *)a->x + at, w ? w + key : 0, cos + table, sin + table,
                            ((const REAL *)a->factors)[(row * n + i) * turned + heads + head], of_keys + slot,
                            (REAL *)a->of_x + at, w ? sums + key : 0, width, 1);
            for (int64_t j = 0; j < width; ++j) of_value[j] = of_values[slot + j];
        }
    }
}

#endif
