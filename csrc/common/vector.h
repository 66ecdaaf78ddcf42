// Vectors of one instruction set, by the compiler's vector extensions: this file is compiled once per set, in a
// namespace of its own, so that the linker never mixes code of different sets.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common/types.h"

namespace probjax::PROBJAX_ISA {

// kRows: rows of the block of results that the product keeps in registers, two vectors wide. It fills the
// registers: 2 * kRows sums, two vectors of one operand, one of the other.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kRows = 12;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kRows = 6;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;
constexpr int kRows = 12;
#else
constexpr int kVectorBytes = 16;
constexpr int kRows = 6;
#endif

template <class T>
constexpr int kLanes = kVectorBytes / sizeof(T);

// Queries that are worked on together, one per lane of two vectors.
template <class T>
constexpr int kPanel = 2 * kLanes<T>;

template <class T>
struct VectorTypes {
  using Int = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  typedef T Vector __attribute__((vector_size(kVectorBytes)));
  typedef T Unaligned __attribute__((vector_size(kVectorBytes), aligned(alignof(T)), may_alias));
  typedef Int IntVector __attribute__((vector_size(kVectorBytes)));
  typedef int8_t Bytes __attribute__((vector_size(kVectorBytes / sizeof(T))));
  typedef uint16_t Halves __attribute__((vector_size(2 * kVectorBytes / sizeof(T))));
};
template <class T>
using Vector = typename VectorTypes<T>::Vector;
template <class T>
using IntVector = typename VectorTypes<T>::IntVector;
typedef uint32_t UintVector __attribute__((vector_size(kVectorBytes)));

#define PROBJAX_INLINE inline __attribute__((always_inline))
#define PROBJAX_NOINLINE __attribute__((noinline))

template <class T>
PROBJAX_INLINE Vector<T> load(const T* p) {
  return *reinterpret_cast<const typename VectorTypes<T>::Unaligned*>(p);
}

template <class T>
PROBJAX_INLINE void store(T* p, Vector<T> v) {
  *reinterpret_cast<typename VectorTypes<T>::Unaligned*>(p) = v;
}

template <class T>
PROBJAX_INLINE Vector<T> broadcast(T x) {
  return x - Vector<T>{};
}

// The larger one; a NaN in `a` is dropped, one in `b` stays.
template <class V>
PROBJAX_INLINE V larger(V a, V b) {
  return a > b ? a : b;
}

template <class T>
PROBJAX_INLINE T sum(Vector<T> v) {
  T total = 0;
  for (int i = 0; i < kLanes<T>; ++i) total += v[i];
  return total;
}

template <class T>
PROBJAX_INLINE T largest(Vector<T> v) {
  T top = v[0];
  for (int i = 1; i < kLanes<T>; ++i) top = v[i] > top ? v[i] : top;
  return top;
}

template <class T>
PROBJAX_INLINE bool any(IntVector<T> v) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)v, (__m256i)v);
#else
  int64_t found = 0;
  for (int i = 0; i < kLanes<T>; ++i) found |= v[i];
  return found != 0;
#endif
}

// kLanes bytes of 0 or -1, widened to the lanes of a vector.
template <class T>
PROBJAX_INLINE IntVector<T> widen_bytes(const int8_t* p) {
  typename VectorTypes<T>::Bytes bytes;
  std::memcpy(&bytes, p, sizeof(bytes));
  return __builtin_convertvector(bytes, IntVector<T>);
}

template <class T>
constexpr T kInfinity = std::numeric_limits<T>::infinity();

// --------------------------------------------------------------------------------------------------------------
// Elementary functions. 2**f on |f| <= 1/2 and (e**r - 1) / r on |r| <= ln(2) / 2 by polynomials of least
// relative error (Remez exchange, computed for this file): 1e-7 and 1e-8 in float, 3e-18 and 2e-19 in double.

template <class T>
struct Coefficients;

template <>
struct Coefficients<float> {
  static constexpr int kMantissa = 23;
  static constexpr float kMagic = 12582912.0f;  // 1.5 * 2**23: adding it rounds to an integer
  static constexpr float kBias = 127.0f;
  static constexpr float kExp2[] = {1.0f,          0.6931469671f,  0.2402211976f,
                                    0.0555071323f, 0.0096755404f, 0.0013276487f};
  static constexpr float kExpm1[] = {1.0f,           0.4999999812f,  0.1666650615f,
                                     0.04166713632f, 0.008369075805f, 0.001388887923f};
  static constexpr float kLn2High = 0.693145751953125f, kLn2Low = 1.428606765330187e-06f;
  static constexpr float kTanhBound = 20.0f;
};

template <>
struct Coefficients<double> {
  static constexpr int kMantissa = 52;
  static constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2**52
  static constexpr double kBias = 1023.0;
  static constexpr double kExp2[] = {
      1.0,
      0.69314718055994533,
      0.240226506959101562,
      0.0555041086648199264,
      0.00961812910758834779,
      0.00133335581467887735,
      0.000154035304624988203,
      0.0000152527334910960904,
      1.32154330973075747e-6,
      1.01781975588464289e-7,
      7.07410434182751635e-9,
      4.43535235186488352e-10};
  static constexpr double kExpm1[] = {
      1.0,
      0.500000000000000001,
      0.166666666666666807,
      0.0416666666666664926,
      0.00833333333331969135,
      0.00138888888889650072,
      0.000198412698898385758,
      0.0000248015871728060649,
      2.7557241113840343e-6,
      2.75573995747757609e-7,
      2.51099736977467923e-8,
      2.08768627948688784e-9};
  static constexpr double kLn2High = 0.693147180369123816, kLn2Low = 1.90821492927058770e-10;
  static constexpr double kTanhBound = 40.0;
};

template <class T, int n>
PROBJAX_INLINE Vector<T> polynomial(const T (&c)[n], Vector<T> x) {
  Vector<T> p = broadcast<T>(c[n - 1]);
#pragma GCC unroll 16
  for (int i = n - 2; i >= 0; --i) p = p * x + c[i];
  return p;
}

template <class T>
constexpr T kLog2E = T(1.44269504088896340736);

// 2**y. Exactly 0 far below, 1 at 0; NaN stays NaN; y must be below kBias, or `bounded` false for infinity there.
//
// 2**y = 2**f * 2**n with n the nearest integer: adding `kMagic` leaves n + kBias in the low bits of the sum,
// and a shift makes a power of two of them. At the lower bound of y that power is 0.
template <class T, bool bounded = true>
PROBJAX_INLINE Vector<T> exp2(Vector<T> y) {
  using C = Coefficients<T>;
  y = larger(broadcast<T>(-C::kBias), y);
  if (!bounded) y = y > C::kBias + 1 ? broadcast<T>(C::kBias + 1) : y;
  Vector<T> t = y + (C::kMagic + C::kBias);
  Vector<T> f = y - (t - (C::kMagic + C::kBias));
  Vector<T> power = (Vector<T>)((IntVector<T>)t << C::kMantissa);
  return polynomial<T>(C::kExp2, f) * power;
}

template <class T>
PROBJAX_INLINE Vector<T> exp(Vector<T> x) {
  return exp2<T, false>(x * kLog2E<T>);
}

// tanh(x) by e**(2|x|) - 1, which keeps the relative accuracy of small x.
template <class T>
PROBJAX_INLINE Vector<T> tanh(Vector<T> x) {
  using C = Coefficients<T>;
  Vector<T> size = x < 0 ? -x : x;
  Vector<T> y = size + size;
  y = y > C::kTanhBound ? broadcast<T>(C::kTanhBound) : y;
  Vector<T> t = y * kLog2E<T> + (C::kMagic + C::kBias);
  Vector<T> n = t - (C::kMagic + C::kBias);
  Vector<T> r = (y - n * C::kLn2High) - n * C::kLn2Low;
  Vector<T> power = (Vector<T>)((IntVector<T>)t << C::kMantissa);
  Vector<T> less_one = polynomial<T>(C::kExpm1, r) * r * power + (power - 1);
  Vector<T> result = less_one / (less_one + 2);
  return x < 0 ? -result : result;
}

// --------------------------------------------------------------------------------------------------------------
// Transposing kLanes x kLanes numbers in registers

template <int step, class V, size_t... lane>
PROBJAX_INLINE void exchange(V& a, V& b, std::index_sequence<lane...>) {
  constexpr int lanes = sizeof...(lane);
  V low = __builtin_shufflevector(a, b, ((lane & step) ? int(lane) - step + lanes : int(lane))...);
  V high = __builtin_shufflevector(a, b, ((lane & step) ? int(lane) + lanes : int(lane) + step)...);
  a = low;
  b = high;
}

template <int step, class V, int lanes>
PROBJAX_INLINE void transpose_from(V (&rows)[lanes]) {
  if constexpr (step < lanes) {
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) {
      if (!(i & step)) exchange<step>(rows[i], rows[i + step], std::make_index_sequence<lanes>());
    }
    transpose_from<2 * step>(rows);
  }
}

template <class V, int lanes>
PROBJAX_INLINE void transpose(V (&rows)[lanes]) {
  transpose_from<1>(rows);
}

// out[j * out_stride + i] = in[i * in_stride + j] for i < rows, j < columns, both padded up to whole vectors:
// rows beyond `rows` are taken as 0, columns beyond `columns` must be readable.
template <class T>
void transpose_block(const T* in, int64_t in_stride, int64_t rows, int64_t columns, T* out, int64_t out_stride) {
  constexpr int lanes = kLanes<T>;
  for (int64_t i = 0; i < rows; i += lanes) {
    for (int64_t j = 0; j < columns; j += lanes) {
      Vector<T> block[lanes];
#pragma GCC unroll 16
      for (int k = 0; k < lanes; ++k) {
        block[k] = i + k < rows ? load(in + (i + k) * in_stride + j) : Vector<T>{};
      }
      transpose(block);
#pragma GCC unroll 16
      for (int k = 0; k < lanes; ++k) store(out + (j + k) * out_stride + i, block[k]);
    }
  }
}

// --------------------------------------------------------------------------------------------------------------
// Half types. Sums are in float; numbers are widened when they are read and rounded once when written.

PROBJAX_INLINE float from_bf16(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

PROBJAX_INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return uint16_t((bits >> 16) | 0x40);
  return uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline float from_f16(uint16_t x) {
#if defined(__F16C__)
  return _cvtsh_ss(x);
#else
  uint32_t sign = uint32_t(x & 0x8000) << 16, exponent = (x >> 10) & 31, mantissa = x & 1023, bits;
  if (exponent == 31) {
    bits = sign | 0x7F800000 | mantissa << 13;
  } else if (exponent) {
    bits = sign | (exponent + 112) << 23 | mantissa << 13;
  } else {
    float out = std::ldexp(float(mantissa), -24);
    return sign ? -out : out;
  }
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
#endif
}

inline uint16_t to_f16(float x) {
#if defined(__F16C__)
  return uint16_t(_cvtss_sh(x, 0));
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  uint32_t size = bits & 0x7FFFFFFF;
  if (size > 0x7F800000) return sign | 0x7E00;
  if (size >= 0x477FF000) return sign | 0x7C00;
  if (size < 0x38800000) {  // below the smallest normal number: in units of 2**-24, ties to even
    float value;
    std::memcpy(&value, &size, 4);
    return sign | uint16_t(std::nearbyint(value * 16777216.0f));
  }
  return sign | uint16_t((size + 0xFFF + (size >> 13 & 1) - 0x38000000) >> 13);
#endif
}

// out[i] = in[offset + i] for i < count, in the type of sums.
template <class T>
inline void widen(const void* data, Type type, int64_t offset, int64_t count, T* out) {
  if (type == Type::f32) {
    const float* in = static_cast<const float*>(data) + offset;
    for (int64_t i = 0; i < count; ++i) out[i] = T(in[i]);
  } else if (type == Type::f64) {
    const double* in = static_cast<const double*>(data) + offset;
    for (int64_t i = 0; i < count; ++i) out[i] = T(in[i]);
  } else if (type == Type::bf16) {
    const uint16_t* in = static_cast<const uint16_t*>(data) + offset;
    for (int64_t i = 0; i < count; ++i) out[i] = T(from_bf16(in[i]));
  } else {
    const uint16_t* in = static_cast<const uint16_t*>(data) + offset;
    int64_t i = 0;
#if defined(__F16C__)
    if constexpr (sizeof(T) == 4) {
      for (; i + 8 <= count; i += 8) {
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
      }
    }
#endif
    for (; i < count; ++i) out[i] = T(from_f16(in[i]));
  }
}

template <class T>
inline T widen_one(const void* data, Type type, int64_t offset) {
  T out;
  widen(data, type, offset, 1, &out);
  return out;
}

// out[offset + i] = in[i] for i < count, rounded.
template <class T>
inline void narrow(const T* in, int64_t count, void* data, Type type, int64_t offset) {
  if (type == Type::f32) {
    float* out = static_cast<float*>(data) + offset;
    for (int64_t i = 0; i < count; ++i) out[i] = float(in[i]);
  } else if (type == Type::f64) {
    double* out = static_cast<double*>(data) + offset;
    for (int64_t i = 0; i < count; ++i) out[i] = double(in[i]);
  } else if (type == Type::bf16) {
    uint16_t* out = static_cast<uint16_t*>(data) + offset;
    for (int64_t i = 0; i < count; ++i) out[i] = to_bf16(float(in[i]));
  } else {
    uint16_t* out = static_cast<uint16_t*>(data) + offset;
    for (int64_t i = 0; i < count; ++i) out[i] = to_f16(float(in[i]));
  }
}

// Flushes denormal numbers to zero while it lives, as XLA's own threads do: they cost a hundred cycles each.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  FlushDenormals() {}
#endif
};

}  // namespace probjax::PROBJAX_ISA
