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
#define PRAGMA(x) _Pragma(#x)
#define ROWS(count, width) PRAGMA(omp parallel for schedule(static) num_threads(threads) if ((count) * (width) > LEAST))

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

/* Gradient of x, given g, that of y; adds g x f to sums [threads, width]. */
void NAME(norm_back)(const REAL *x, const REAL *w, const REAL *f, const REAL *g, REAL *of_x, REAL *sums, int64_t rows,
                     int64_t width, int threads) {
    ROWS(rows, width)
    for (int64_t row = 0; row < rows; ++row) {
        const REAL *from = x + row * width, *grad = g + row * width, factor = f[row];
        REAL *to = of_x + row * width, *sum = sums + THREAD * width, along = 0;
#pragma omp simd reduction(+ : along)
        for (int64_t i = 0; i < width; ++i) {
            const REAL product = grad[i] * from[i] * factor;
            sum[i] += product;
            along += product * w[i];
        }
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) to[i] = (grad[i] * w[i] - from[i] * factor * along) * factor;
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

/* The norm of each head as above, turned by the tables' angle.

   x: [rows, n, heads, width], with steps between rows and between positions; w: [heads, width], or one for all heads
   with step 0; cos, sin: [rows or 1, n, width], with step 0 between rows for one; y: [rows, n, heads, width]; f: [rows,
   n, heads]. */
void NAME(turn)(const REAL *x, const REAL *w, const REAL *cos, const REAL *sin, REAL *y, REAL *f, int64_t rows,
                int64_t n, int64_t heads, int64_t width, int64_t row_step, int64_t step, int64_t head_step,
                int64_t table_row_step, int64_t table_step, double least, int threads) {
    const int64_t half = width / 2;
    ROWS(rows * n, heads * width)
    for (int64_t place = 0; place < rows * n; ++place) {
        const int64_t table = place / n * table_row_step + place % n * table_step;
        for (int64_t head = 0; head < heads; ++head) {
            const REAL *from = x + place / n * row_step + place % n * step + head * width, *weight = w + head * head_step;
            REAL *to = y + (place * heads + head) * width, square = 0;
#pragma omp simd reduction(+ : square)
            for (int64_t i = 0; i < width; ++i) square += from[i] * from[i];
            const REAL factor = f[place * heads + head] = 1 / SQRT(square + (REAL)least);
#pragma omp simd
            for (int64_t i = 0; i < half; ++i) {
                const REAL one = from[i] * factor * weight[i], other = from[i + half] * factor * weight[i + half];
                to[i] = one * cos[table + i] - other * sin[table + i];
                to[i + half] = other * cos[table + i + half] + one * sin[table + i + half];
            }
        }
    }
}

/* Gradient of x, which has steps of its own, given g, that of y; adds to sums [threads, heads or 1, width]. */
void NAME(turn_back)(const REAL *x, const REAL *w, const REAL *cos, const REAL *sin, const REAL *f, const REAL *g,
                     REAL *of_x, REAL *sums, int64_t rows, int64_t n, int64_t heads, int64_t width, int64_t row_step,
                     int64_t step, int64_t head_step, int64_t table_row_step, int64_t table_step, int64_t of_row_step,
                     int64_t of_step, int threads) {
    const int64_t half = width / 2;
    ROWS(rows * n, heads * width)
    for (int64_t place = 0; place < rows * n; ++place) {
        const int64_t table = place / n * table_row_step + place % n * table_step;
        REAL back[MOST_HEAD];
        for (int64_t head = 0; head < heads; ++head) {
            const REAL *from = x + place / n * row_step + place % n * step + head * width, *weight = w + head * head_step;
            const REAL *grad = g + (place * heads + head) * width, factor = f[place * heads + head];
            REAL *to = of_x + place / n * of_row_step + place % n * of_step + head * width;
            REAL *sum = sums + THREAD * (head_step ? heads : 1) * width + head * head_step, along = 0;
#pragma omp simd
            for (int64_t i = 0; i < half; ++i) {
                back[i] = grad[i] * cos[table + i] + grad[i + half] * sin[table + i + half];
                back[i + half] = grad[i + half] * cos[table + i + half] - grad[i] * sin[table + i];
            }
#pragma omp simd reduction(+ : along)
            for (int64_t i = 0; i < width; ++i) {
                const REAL product = back[i] * from[i] * factor;
                sum[i] += product;
                along += product * weight[i];
            }
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) to[i] = (back[i] * weight[i] - from[i] * factor * along) * factor;
        }
    }
}

#endif
