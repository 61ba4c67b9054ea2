// What one call of paged attention was given: pools read through block tables, rows of queries and results, threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "vectors.h"

namespace octavo {

constexpr float kNothing = -INFINITY;  // the score of a position that is not visible

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

// Memory of one call, kept by the calling thread for the next one. 64-byte lines: a vector never straddles two.
struct alignas(64) Line {
  float floats[16];
};

inline size_t lines(size_t floats) { return (floats + 15) / 16; }

// Queries and results: float32 or bfloat16. Told apart at run time, since only whole rows are ever read or written.
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
  void write(int64_t at, int count, const float* from, int step, float divisor) const {
    if (is_bfloat16) {
      BFloat16* to = static_cast<BFloat16*>(data) + at;
      for (int i = 0; i < count; i++) to[i] = to_bfloat16(from[i * step] / divisor);
    } else {
      float* to = static_cast<float*>(data) + at;
      for (int i = 0; i < count; i++) to[i] = from[i * step] / divisor;
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
  float scale;  // of the scores, in powers of two: what the caller gave, times log2(e)
  Threads threads;

  int group() const { return heads / kv_heads; }
  int queries(int b) const { return query_starts[b + 1] - query_starts[b]; }
  const int32_t* table(int b) const { return tables + b * table_stride; }

  // The rows of a sequence's KV head are (query, head of the group), heads fastest. Elements go `step` floats apart.
  void read_query(int b, int kv_head, int row, float* to, int step) const {
    const int64_t token = query_starts[b] + row / group(), head = kv_head * group() + row % group();
    q.read(token * q_token_stride + head * q_head_stride, dim, scale, to, step);
  }
  void write_result(int b, int kv_head, int row, const float* from, int step, float divisor) const {
    const int64_t token = query_starts[b] + row / group(), head = kv_head * group() + row % group();
    out.write((token * heads + head) * dim, dim, from, step, divisor);
  }
};

// Up to kWidth neighbouring positions of one block and KV head.
template <typename KV>
struct Tile {
  const KV *k, *v;
  int count;
};

template <typename KV>
inline Tile<KV> tile_at(const Call<KV>& call, const int32_t* table, int kv_head, int position, int end) {
  const int32_t block = table[position / call.block_size];
  const int offset = position % call.block_size;
  const int count = std::min({kWidth, call.block_size - offset, end - position});
  return {call.k.slot(block, kv_head, offset), call.v.slot(block, kv_head, offset), count};
}

}  // namespace octavo
