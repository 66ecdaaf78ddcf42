// What the kernels of all operations agree on about arrays.
#pragma once

#include <cstdint>

namespace probjax {

enum class Type : uint8_t { f32, f64, bf16, f16, boolean, s32, s64 };

constexpr int kMaxBatchRank = 8;

}  // namespace probjax
