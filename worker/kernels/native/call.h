// What one call of paged attention was given: pools read through block tables, rows of queries and results, threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "vectors.h"

namespace octavo {

constexpr float kLog2E = 1.44269504f;
constexpr float kNothing = -INFINITY;  // the score of a position that is not visible
constexpr float kLowest = -1e30f;      // where a peak starts: finite, so that nothing but kNothing still fades by 1

// What a pool holds, by the numbers of `POOL_TYPES` in native.py.
enum Type { kFloat32 = 0, kBFloat16 = 1, kE4M3 = 2, kE5M2 = 3 };

template <typename T>
struct Pool {
  const T* data;
  int64_t block_stride, head_stride, slot_stride;  // in elements; the elements of a slot lie side by side

  const T* slot(int32_t block, int kv_head, int offset) const {
    return data + block * block_stride + kv_head * head_stride + offset * slot_stride;
  }
};

// GOMP_parallel of the OpenMP runtime that torch has loaded: runs `body(data)` on `threads` threads of that runtime's
// pool. Borrowing it means that no second pool of threads fights the first for the cores. Null: one thread.
using Parallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

struct Threads {
  Parallel start;
  int count;
};

// Runs body(index, thread) for every index below `count`, in any order; `thread` numbers the threads from 0.
template <typename Body>
void for_each(const Threads& threads, int count, const Body& body) {
  struct Share {
    const Body& body;
    const int count;
    std::atomic<int> next_index{0}, next_thread{0};
  } share{body, count};
  const auto work = [](void* data) {
    Share& mine = *static_cast<Share*>(data);
    const int thread = mine.next_thread++;
    for (int i; (i = mine.next_index++) < mine.count;) mine.body(i, thread);
  };
  const int wanted = std::min(threads.count, count);
  if (wanted <= 1 || threads.start == nullptr) {
    work(&share);
  } else {
    threads.start(work, &share, static_cast<unsigned>(wanted), 0);
  }
}

// Runs body(index) for every index below `count`. Each thread goes through a stretch of its own in order, so that it
// reads memory in one sweep, and then helps where others are behind: a thread that comes late holds nobody up.
template <typename Body>
void for_each_in_order(const Threads& threads, int count, const Body& body) {
  constexpr int kMost = 128;
  struct alignas(64) Stretch {
    std::atomic<int> next;
    int end;
  } stretches[kMost];
  const int wanted = std::max(1, std::min({threads.count, count, kMost}));
  for (int i = 0; i < wanted; i++) {
    stretches[i].next = static_cast<int>(static_cast<int64_t>(count) * i / wanted);
    stretches[i].end = static_cast<int>(static_cast<int64_t>(count) * (i + 1) / wanted);
  }
  for_each(threads, wanted, [&](int own, int) {
    for (int k = 0; k < wanted; k++) {
      Stretch& stretch = stretches[(own + k) % wanted];
      for (int i; (i = stretch.next++) < stretch.end;) body(i);
    }
  });
}

// Memory of one call, kept by the calling thread for the next one. 64-byte lines: a vector never straddles two.
struct alignas(64) Line {
  float floats[16];
};

inline size_t lines(size_t floats) { return (floats + 15) / 16; }

// Queries and results: float32 or bfloat16. Told apart at run time, since only whole rows are read or written.
struct Rows {
  void* data;
  bool is_bfloat16;

  void read(int64_t at, int count, float factor, float* to, int step) const {
    if (is_bfloat16) {
      const BFloat16* from = static_cast<const BFloat16*>(data) + at;
      for (int i = 0; i < count; i++) to[i * step] = to_float(from[i]) * factor;
    } else {
      const float* from = static_cast<const float*>(data) + at;
      for (int i = 0; i < count; i++) to[i * step] = from[i] * factor;
    }
  }
  void write(int64_t at, int count, float factor, const float* from, int step) const {
    if (is_bfloat16) {
      BFloat16* to = static_cast<BFloat16*>(data) + at;
      for (int i = 0; i < count; i++) to[i] = to_bfloat16(from[i * step] * factor);
    } else {
      float* to = static_cast<float*>(data) + at;
      for (int i = 0; i < count; i++) to[i] = from[i * step] * factor;
    }
  }
};

template <typename KV>
struct Call {
  Rows q;
  int64_t q_token_stride, q_head_stride;
  Pool<KV> k, v;
  const int32_t* tables;  // [B, M], rows `table_stride` apart
  int64_t table_stride;
  const int32_t* lengths;
  const int32_t* query_starts;
  Rows out;  // [T, Hq, D], contiguous
  int sequences, heads, kv_heads, dim, block_size;
  // Scores are kept as exponents of two, so what the caller gives for them is multiplied by log2(e).
  float scale;
  float soft_cap;                 // 0: none
  const float* sinks;             // [Hq], or null; as the caller gave them
  const float *k_scale, *v_scale;  // [Hkv], or null
  int window;                     // positions that a query sees
  Threads threads;

  int group() const { return heads / kv_heads; }
  int queries(int b) const { return query_starts[b + 1] - query_starts[b]; }
  const int32_t* table(int b) const { return tables + b * table_stride; }

  // The rows of a sequence's KV head are (query, head of the group), heads fastest. Elements go `step` floats apart.
  int head(int kv_head, int row) const { return kv_head * group() + row % group(); }
  void read_query(int b, int kv_head, int row, float* to, int step) const {
    const int64_t token = query_starts[b] + row / group();
    const float factor = k_scale ? scale * k_scale[kv_head] : scale;
    q.read(token * q_token_stride + head(kv_head, row) * q_head_stride, dim, factor, to, step);
  }
  // `from` is what the weighted values came to, `total` the sum of the weights.
  void write_result(int b, int kv_head, int row, const float* from, int step, float total) const {
    const int64_t token = query_starts[b] + row / group();
    const float factor = (v_scale ? v_scale[kv_head] : 1.0f) / total;
    out.write((token * heads + head(kv_head, row)) * dim, dim, factor, from, step);
  }
  // A sink is a score whose value is zero; without one, nothing.
  float sink(int head) const { return sinks ? sinks[head] * kLog2E : kNothing; }
  // The first position that the query at `position` sees.
  int first_visible(int position) const { return std::max(0, position + 1 - window); }
};

}  // namespace octavo
