// The one product that everything is made of.
#pragma once

#include "common/vector.h"

namespace probjax::PROBJAX_ISA {

// How the left operand lies: A(i, k) at a[k * stride + i], or at a[i * kRowStride + k].
enum class Left { columns, rows };

// Row stride of a left operand that lies by rows: known to the compiler, so that the addresses of a block of
// rows are constants. It is the number of queries that backward works on together.
constexpr int kRowStride = 64;

// C(i, j) (+)= sum over k < depth of A(i, k) * B(k, j) for i < rows and j < vectors * kLanes. The sum starts at zero
// and is added at the end: over many tiles, rounding errors then grow with the number of tiles, not of terms.
template <class T, int rows, int vectors, Left left, bool add>
PROBJAX_INLINE void block_product(int64_t depth, const T* __restrict a, int64_t a_stride, const T* __restrict b,
                                  int64_t b_stride, T* __restrict c, int64_t c_stride) {
  constexpr int lanes = kLanes<T>;
  Vector<T> sums[rows][vectors];
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) sums[i][j] = Vector<T>{};
  }
#pragma GCC unroll 2
  for (int64_t k = 0; k < depth; ++k) {
    Vector<T> right[vectors];
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) right[j] = load(b + k * b_stride + j * lanes);
#pragma GCC unroll 16
    for (int i = 0; i < rows; ++i) {
      Vector<T> factor = broadcast<T>(left == Left::columns ? a[k * a_stride + i] : a[i * kRowStride + k]);
#pragma GCC unroll 4
      for (int j = 0; j < vectors; ++j) sums[i][j] += factor * right[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) {
      T* at = c + i * c_stride + j * lanes;
      store(at, add ? load(at) + sums[i][j] : sums[i][j]);
    }
  }
}

// What is left after blocks of kRows, in blocks of 8, 4, 2 and 1: few sizes keep the library small.
template <class T, int rows, int vectors, Left left, bool add>
PROBJAX_INLINE void last_rows(int64_t count, int64_t depth, const T* a, int64_t a_stride, const T* b,
                              int64_t b_stride, T* c, int64_t c_stride) {
  if (count & rows) {
    block_product<T, rows, vectors, left, add>(depth, a, a_stride, b, b_stride, c, c_stride);
    a += left == Left::columns ? rows : rows * kRowStride;
    c += rows * c_stride;
  }
  if constexpr (rows > 1) {
    last_rows<T, rows / 2, vectors, left, add>(count, depth, a, a_stride, b, b_stride, c, c_stride);
  }
}

template <class T, int vectors, Left left, bool add>
__attribute__((noinline)) void product_of(int64_t rows, int64_t depth, const T* a, int64_t a_stride, const T* b,
                                          int64_t b_stride, T* c, int64_t c_stride) {
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows) {
    const T* block = left == Left::columns ? a + i : a + i * kRowStride;
    block_product<T, kRows, vectors, left, add>(depth, block, a_stride, b, b_stride, c + i * c_stride, c_stride);
  }
  const T* block = left == Left::columns ? a + i : a + i * kRowStride;
  constexpr int most = kRows > 8 ? 8 : 4;
  last_rows<T, most, vectors, left, add>(rows - i, depth, block, a_stride, b, b_stride, c + i * c_stride, c_stride);
}

// The left operand by columns; `width` is a multiple of kLanes.
template <class T, bool add>
inline void product(int64_t rows, int64_t depth, const T* a, int64_t a_stride, const T* b, int64_t b_stride, T* c,
                    int64_t c_stride, int64_t width) {
  int64_t j = 0;
  for (; j + kPanel<T> <= width; j += kPanel<T>) {
    product_of<T, 2, Left::columns, add>(rows, depth, a, a_stride, b + j, b_stride, c + j, c_stride);
  }
  if (j < width) product_of<T, 1, Left::columns, add>(rows, depth, a, a_stride, b + j, b_stride, c + j, c_stride);
}

// The left operand by rows of kRowStride, added to C.
template <class T>
inline void add_row_product(int64_t rows, int64_t depth, const T* a, const T* b, int64_t b_stride, T* c,
                            int64_t c_stride, int64_t width) {
  int64_t j = 0;
  for (; j + kPanel<T> <= width; j += kPanel<T>) {
    product_of<T, 2, Left::rows, true>(rows, depth, a, 0, b + j, b_stride, c + j, c_stride);
  }
  if (j < width) product_of<T, 1, Left::rows, true>(rows, depth, a, 0, b + j, b_stride, c + j, c_stride);
}

}  // namespace probjax::PROBJAX_ISA
