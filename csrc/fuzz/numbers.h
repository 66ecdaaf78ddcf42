// The number types of arrays, read and written one by one as float64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "attention/problem.h"

namespace probjax::fuzz {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Binary floating point: bits of precision (with the hidden one) and the exponent of the least normal number.
struct Format {
  int precision, least_exponent;
  double most;  // the largest finite number
};

inline Format format(Type type) {
  switch (type) {
    case Type::f64: return {53, -1022, std::numeric_limits<double>::max()};
    case Type::bf16: return {8, -126, std::ldexp(255.0, 120)};
    case Type::f16: return {11, -14, 65504};
    default: return {24, -126, std::numeric_limits<float>::max()};
  }
}

inline int64_t size_of(Type type) {
  switch (type) {
    case Type::f64:
    case Type::s64: return 8;
    case Type::bf16:
    case Type::f16: return 2;
    case Type::boolean: return 1;
    default: return 4;
  }
}

inline bool is_float(Type type) { return type <= Type::f16; }

// The nearest number of a type; beyond its range, an infinity.
inline double rounded(Type type, double x) {
  if (type == Type::f64 || !std::isfinite(x) || x == 0) return x;
  Format f = format(type);
  int exponent = std::max(std::ilogb(x), f.least_exponent) - (f.precision - 1);
  double y = std::ldexp(std::nearbyint(std::ldexp(x, -exponent)), exponent);
  return std::fabs(y) > f.most ? std::copysign(kInfinity, x) : y;
}

template <class T>
T load_as(const void* from) {
  T x;
  std::memcpy(&x, from, sizeof(T));
  return x;
}

inline double half_to_double(uint16_t bits) {
  int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double x = exponent == 31  ? (fraction ? kNan : kInfinity)
             : exponent == 0 ? std::ldexp(fraction, -24)
                             : std::ldexp(1024 + fraction, exponent - 25);
  return bits & 0x8000 ? -x : x;
}

inline uint16_t double_to_half(double x) {
  uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  x = std::fabs(rounded(Type::f16, x));
  if (std::isnan(x)) return sign | 0x7E00;
  if (std::isinf(x)) return sign | 0x7C00;
  int exponent = std::max(x == 0 ? -14 : std::ilogb(x), -14);
  // A subnormal number has a fraction below 1024, which makes its exponent field 0.
  return sign | static_cast<uint16_t>((exponent + 14) * 1024 + static_cast<int>(std::ldexp(x, 10 - exponent)));
}

inline double bfloat_to_double(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  return load_as<float>(&wide);
}

inline uint16_t double_to_bfloat(double x) {
  float narrow = static_cast<float>(rounded(Type::bf16, x));
  return static_cast<uint16_t>(load_as<uint32_t>(&narrow) >> 16);
}

inline const char* element(const Array& array, int64_t offset) {
  return static_cast<const char*>(array.data) + offset * size_of(array.type);
}

inline double load(const Array& array, int64_t offset) {
  const char* from = element(array, offset);
  switch (array.type) {
    case Type::f32: return load_as<float>(from);
    case Type::f64: return load_as<double>(from);
    case Type::bf16: return bfloat_to_double(load_as<uint16_t>(from));
    case Type::f16: return half_to_double(load_as<uint16_t>(from));
    case Type::boolean: return *from != 0;
    case Type::s32: return load_as<int32_t>(from);
    case Type::s64: break;
  }
  return static_cast<double>(load_as<int64_t>(from));
}

inline int64_t load_integer(const Array& array, int64_t offset) {
  const char* from = element(array, offset);
  return array.type == Type::s64 ? load_as<int64_t>(from) : load_as<int32_t>(from);
}

template <class T>
void store_as(char* to, T x) {
  std::memcpy(to, &x, sizeof(T));
}

inline void store(const Array& array, int64_t offset, double x) {
  char* to = const_cast<char*>(element(array, offset));
  switch (array.type) {
    case Type::f32: return store_as(to, static_cast<float>(rounded(Type::f32, x)));
    case Type::f64: return store_as(to, x);
    case Type::bf16: return store_as(to, double_to_bfloat(x));
    case Type::f16: return store_as(to, double_to_half(x));
    case Type::boolean: return store_as(to, static_cast<uint8_t>(x != 0));
    case Type::s32: return store_as(to, static_cast<int32_t>(x));
    case Type::s64: return store_as(to, static_cast<int64_t>(x));
  }
}

}  // namespace probjax::fuzz
