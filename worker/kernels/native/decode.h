// Decode: the rows of one query, the heads of a group, attend to K and V straight from the pool.
//
// Bound by memory. Every K and V is read once, by all heads of its group together, and the next block is asked for
// while this one is computed. A vector holds neighbouring elements of a head.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "call.h"

namespace octavo {

constexpr int kSpan = 512;  // positions that one piece of work takes; a fixed cut, see paged_attention.cpp

// The running softmax of one row: kWidth sums that are added up at the end, and the largest score in every lane.
struct Row {
  Floats peak, total;
};

// kWidth slots of one KV head, of which the first `count` are positions of the sequence, and where the next ones lie.
template <typename KV>
struct Tile {
  const KV *k, *v;
  int64_t k_stride, v_stride;  // between slots
  int count;
  const KV *next_k, *next_v;
};

template <typename KV>
inline void prefetch(const KV* row, int dim) {
  const char* bytes = reinterpret_cast<const char*>(row);
  for (size_t at = 0; at < dim * sizeof(KV); at += 64) __builtin_prefetch(bytes + at, 0, 1);
}

// The tile of `count` positions from `position` on, which lie in several blocks or fill less than a vector. They are
// copied together, before zeros: what else a block holds may be NaN, which a weight of 0 would not silence.
template <typename KV>
Tile<KV> assemble(const Call<KV>& call, const int32_t* table, int kv_head, int position, int count, KV* copy) {
  const size_t row = call.dim * sizeof(KV);
  KV *k = copy, *v = copy + kWidth * call.dim;
  for (int t = 0; t < kWidth; t++, k += call.dim, v += call.dim) {
    if (t < count) {
      const int32_t block = table[(position + t) / call.block_size];
      const int offset = (position + t) % call.block_size;
      std::memcpy(k, call.k.slot(block, kv_head, offset), row);
      std::memcpy(v, call.v.slot(block, kv_head, offset), row);
    } else {
      std::memset(k, 0, row);
      std::memset(v, 0, row);
    }
  }
  return {copy, copy + kWidth * call.dim, call.dim, call.dim, count, copy, copy};
}

// The positions from `position` on, to a multiple of kWidth or to `end`.
template <typename KV>
inline Tile<KV> tile_at(const Call<KV>& call, const int32_t* table, int kv_head, int position, int end, KV* copy) {
  const int offset = position % call.block_size, count = std::min(kWidth - position % kWidth, end - position);
  if (count < kWidth || offset + kWidth > call.block_size) {
    return assemble(call, table, kv_head, position, count, copy);
  }
  const int32_t block = table[position / call.block_size];
  const int next = position + kWidth < end ? position + kWidth : position;
  const int32_t next_block = table[next / call.block_size];
  return {call.k.slot(block, kv_head, offset),
          call.v.slot(block, kv_head, offset),
          call.k.slot_stride,
          call.v.slot_stride,
          count,
          call.k.slot(next_block, kv_head, next % call.block_size),
          call.v.slot(next_block, kv_head, next % call.block_size)};
}

// The loops below are compiled for the usual head sizes and for any other: one whose length the compiler knows is
// shorter. kDim is the head size, or 0 where only the call knows it.

// Scores of kRows rows at the tile's positions, one position a lane. Asks for the next tile's K and V on the way: the
// memory is busy while the arithmetic runs.
template <int kRows, int kDim, typename KV>
inline void score(const float* q, const Tile<KV>& tile, int dim, Floats* scores) {
  Floats partial[kRows][kWidth];
  for (int t = 0; t < kWidth; t++) {
    prefetch(tile.next_k + t * tile.k_stride, dim);
    prefetch(tile.next_v + t * tile.v_stride, dim);
    Floats sum[kRows] = {};
    for (int d = 0; d < dim; d += kWidth) {
      const Floats k = load(tile.k + t * tile.k_stride + d);
      for (int r = 0; r < kRows; r++) sum[r] += load(q + r * dim + d) * k;
    }
    for (int r = 0; r < kRows; r++) partial[r][t] = sum[r];
  }
  for (int r = 0; r < kRows; r++) scores[r] = sum_each(partial[r]);
}

// out[r] = fade[r] * out[r] + sum over the tile of weight * V; kCols vectors of kRows rows, from `v` and `out` on.
template <int kRows, int kCols, typename KV>
inline void accumulate(const float (*weights)[kWidth], const Floats* fade, const KV* v, int64_t stride, float* out,
                       int dim) {
  Floats sum[kRows][kCols];
  for (int r = 0; r < kRows; r++)
    for (int c = 0; c < kCols; c++) sum[r][c] = load(out + r * dim + c * kWidth) * fade[r];
  for (int t = 0; t < kWidth; t++) {
    for (int c = 0; c < kCols; c++) {
      const Floats value = load(v + t * stride + c * kWidth);
      for (int r = 0; r < kRows; r++) sum[r][c] += weights[r][t] * value;
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int c = 0; c < kCols; c++) store(out + r * dim + c * kWidth, sum[r][c]);
}

// One tile of online softmax for kRows rows; `q`, `rows` and `out` begin at the first of them.
template <int kRows, int kDim, typename KV>
inline void decode_rows(const Call<KV>& call, const float* q, const Tile<KV>& tile, Row* rows, float* out) {
  constexpr int kCols = 64 / kWidth < 4 ? 64 / kWidth : 4;
  const int dim = kDim ? kDim : call.dim;
  Floats scores[kRows], fade[kRows];
  float weights[kRows][kWidth];
  score<kRows, kDim>(q, tile, dim, scores);
  if (call.soft_cap != 0.0f) {
    for (int r = 0; r < kRows; r++) scores[r] = capped(scores[r], call.soft_cap);
  }
  for (int r = 0; r < kRows; r++) {
    if (tile.count < kWidth) scores[r] = lane_numbers() < tile.count ? scores[r] : splat(kNothing);
    const Floats peak = larger(largest_lane(scores[r]), rows[r].peak);
    const Floats weight = exp2_of(scores[r] - peak);
    fade[r] = exp2_of(rows[r].peak - peak);
    rows[r] = {peak, rows[r].total * fade[r] + weight};
    store(weights[r], weight);
  }
  int d = 0;
  for (; d + kCols * kWidth <= dim; d += kCols * kWidth)
    accumulate<kRows, kCols>(weights, fade, tile.v + d, tile.v_stride, out + d, dim);
  for (; d < dim; d += kWidth) accumulate<kRows, 1>(weights, fade, tile.v + d, tile.v_stride, out + d, dim);
}

// One tile for all rows of the group.
template <int kDim, typename KV>
inline void decode_tile(const Call<KV>& call, const float* q, const Tile<KV>& tile, Row* rows, float* out) {
  const int dim = kDim ? kDim : call.dim;
  for (int left = call.group(); left > 0; left -= 4, q += 4 * dim, rows += 4, out += 4 * dim) {
    switch (left) {
      case 1: decode_rows<1, kDim>(call, q, tile, rows, out); break;
      case 2: decode_rows<2, kDim>(call, q, tile, rows, out); break;
      case 3: decode_rows<3, kDim>(call, q, tile, rows, out); break;
      default: decode_rows<4, kDim>(call, q, tile, rows, out);
    }
  }
}

// What a span of positions came to, for the G rows of one KV head: merged with the other spans afterwards.
struct Span {
  int sequence, kv_head, begin, end;
  int owner;  // the number of the (sequence, KV head) in Work::first_span
};

struct Partial {
  float *peak, *total;  // [G]
  float* out;           // [G, D], not yet divided by the total
};

// Floats of scratch that `decode` takes.
template <typename KV>
size_t decode_lines(const Call<KV>& call) {
  const size_t group = call.group(), dim = call.dim;
  return lines(group * dim) + lines(group * sizeof(Row) / sizeof(float)) + 2 * lines(kWidth * dim);
}

template <int kDim, typename KV>
void decode(const Call<KV>& call, const Span& span, const Partial& partial, Line* scratch) {
  const int group = call.group(), dim = kDim ? kDim : call.dim;
  float* q = scratch->floats;
  for (int r = 0; r < group; r++) call.read_query(span.sequence, span.kv_head, r, q + r * dim, 1);
  scratch += lines(static_cast<size_t>(group) * dim);
  Row* rows = reinterpret_cast<Row*>(scratch);
  for (int r = 0; r < group; r++) rows[r] = {splat(kLowest), Floats{}};
  KV* copy = reinterpret_cast<KV*>(scratch + lines(group * sizeof(Row) / sizeof(float)));
  std::fill_n(partial.out, static_cast<size_t>(group) * dim, 0.0f);

  for (int position = span.begin; position < span.end;) {
    const Tile<KV> tile = tile_at(call, call.table(span.sequence), span.kv_head, position, span.end, copy);
    decode_tile<kDim>(call, q, tile, rows, partial.out);
    position += tile.count;
  }
  for (int r = 0; r < group; r++) {
    partial.peak[r] = rows[r].peak[0];
    partial.total[r] = sum_lanes(rows[r].total);
  }
}

// Joins the spans of one sequence's KV head, in the order of positions.
template <typename KV>
void merge(const Call<KV>& call, const Span* spans, const Partial* partials, int count, Line* scratch) {
  const int dim = call.dim;
  float* sum = scratch->floats;
  for (int r = 0; r < call.group(); r++) {
    const float sink = call.sink(call.head(spans->kv_head, r));
    float peak = std::max(sink, partials[0].peak[r]);
    for (int i = 1; i < count; i++) peak = std::max(peak, partials[i].peak[r]);
    float total = std::exp2(sink - peak);
    std::fill_n(sum, dim, 0.0f);
    for (int i = 0; i < count; i++) {
      const float weight = std::exp2(partials[i].peak[r] - peak);
      total += weight * partials[i].total[r];
      for (int d = 0; d < dim; d++) sum[d] += weight * partials[i].out[r * dim + d];
    }
    call.write_result(spans->sequence, spans->kv_head, r, sum, 1, total);
  }
}

}  // namespace octavo
