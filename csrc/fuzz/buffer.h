// Arrays that own their memory, with guards before, between and behind their numbers.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "attention/problem.h"
#include "fuzz/numbers.h"
#include "fuzz/random.h"

namespace probjax::fuzz {

struct Axis {
  int64_t size = 1, stride = 0;
};

// Memory of exactly as many bytes as are used, so that AddressSanitizer sees a step beyond.
class Memory {
 public:
  explicit Memory(int64_t bytes, int fill = 0xFF) : bytes_(bytes), data_(new char[bytes]) {
    std::memset(data_.get(), fill, bytes);
  }

  char* data() const { return data_.get(); }
  int64_t bytes() const { return bytes_; }
  Memory copy() const {
    Memory other(bytes_);
    std::memcpy(other.data(), data(), bytes_);
    return other;
  }
  bool operator==(const Memory& other) const {
    return bytes_ == other.bytes_ && std::memcmp(data(), other.data(), bytes_) == 0;
  }

 private:
  int64_t bytes_;
  std::unique_ptr<char[]> data_;
};

struct Buffer {
  std::string name;
  Array array;
  std::vector<Axis> axes;  // batch axes, then the named ones
  Memory memory{0};
  int64_t lead = 0;  // bytes in front of the array

  // The same array in other memory of this size.
  Array in(const Memory& other) const {
    Array moved = array;
    moved.data = other.data() + lead;
    return moved;
  }
};

namespace detail {

template <class Body>
void each_cell(const std::vector<Axis>& axes, size_t axis, int64_t offset, const Body& body) {
  if (axis == axes.size()) return body(offset);
  for (int64_t i = 0; i < axes[axis].size; ++i) each_cell(axes, axis + 1, offset + i * axes[axis].stride, body);
}

}  // namespace detail

// Calls `body` with the offset of every number.
template <class Body>
void each_cell(const Buffer& buffer, const Body& body) {
  detail::each_cell(buffer.axes, 0, 0, body);
}

// Numbers along the last axis of query, key, value and their like.
inline int64_t row_size(const Buffer& buffer) { return buffer.axes.back().size; }

template <class Body>
void each_row(const Buffer& buffer, const Body& body) {
  auto outer = buffer.axes;
  outer.pop_back();
  detail::each_cell(outer, 0, 0, body);
}

// The sizes of an array, and how it lies in memory.
struct Shape {
  std::vector<int64_t> batch, named;
  bool rows = false;            // like query: the last axis has stride 1
  bool heads_outside = false;   // the two first named axes change places
  bool compact = false;         // in order and without gaps
};

// A buffer of that shape. Gaps between rows and the places around hold bytes of 0xFF: NaN, -1 or true.
inline Buffer make_buffer(Random& random, const std::string& name, Type type, const Shape& shape) {
  Buffer buffer;
  buffer.name = name;
  for (int64_t size : shape.batch) buffer.axes.push_back({size});
  for (int64_t size : shape.named) buffer.axes.push_back({size});

  std::vector<Axis*> order;
  for (Axis& axis : buffer.axes) order.push_back(&axis);
  size_t n = shape.batch.size();
  if (shape.heads_outside) std::swap(order[n], order[n + 1]);
  bool padded = !shape.compact && random.chance(0.4), guarded = random.chance(0.5);
  int64_t extent = 1;
  for (size_t k = order.size(); k-- > 0;) {
    bool last = k + 1 == order.size();
    // Axes of size 1 have stride 0: this one may stand for more.
    order[k]->stride = order[k]->size == 1 && !(shape.rows && last) ? 0 : extent;
    extent *= order[k]->size;
    if (padded && !(last && order[k]->size == 1)) extent += random.pick({0, 0, 1, 3, 8});
  }
  int64_t used = 1;
  for (const Axis& axis : buffer.axes) used += (axis.size - 1) * axis.stride;

  Array& array = buffer.array;
  array.type = type;
  for (size_t r = 0; r < n; ++r) array.batch[r] = buffer.axes[r].stride;
  size_t listed = shape.named.size() - (shape.rows ? 1 : 0);
  for (size_t k = 0; k < listed; ++k) array.axis[k] = buffer.axes[n + k].stride;
  int64_t size = size_of(type);
  buffer.lead = guarded ? random.between(0, 5) * size : 0;
  buffer.memory = Memory(buffer.lead + used * size + (guarded ? 64 : 0));
  array.data = buffer.memory.data() + buffer.lead;
  return buffer;
}

}  // namespace probjax::fuzz
