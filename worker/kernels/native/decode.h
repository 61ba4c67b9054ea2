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

constexpr int kSpan = 256;  // positions that one piece of work takes; a fixed cut, see paged_attention.cpp

// The running softmax of one row: kWidth sums that are added up at the end, and the largest score in every lane.
struct Row {
  Floats peak, total;
};

template <typename KV>
inline void prefetch(const KV* row, int dim) {
  const char* bytes = reinterpret_cast<const char*>(row);
  for (size_t at = 0; at < dim * sizeof(KV); at += 64) __builtin_prefetch(bytes + at);
}

// The loops below are compiled for full tiles and for any others, for the usual head sizes and for any other: a loop
// whose length the compiler knows is shorter. kDim is the head size, or 0 where only the call knows it.
template <bool kFull, typename KV>
inline int positions_of(const Tile<KV>& tile) {
  return kFull ? kWidth : tile.count;
}

// Scores of kRows rows at the tile's positions, one position a lane. Asks for the next tile's K and V on the way: the
// memory is busy while the arithmetic runs.
template <int kRows, int kDim, bool kFull, typename KV>
inline void score(const Call<KV>& call, const float* q, const Tile<KV>& tile, const Tile<KV>& next, Floats* scores) {
  const int dim = kDim ? kDim : call.dim;
  Floats partial[kRows][kWidth];
  if (!kFull) std::memset(partial, 0, sizeof partial);
  for (int t = 0; t < positions_of<kFull>(tile); t++) {
    prefetch(next.k + t * call.k.slot_stride, dim);
    prefetch(next.v + t * call.v.slot_stride, dim);
    Floats sum[kRows] = {};
    for (int d = 0; d < dim; d += kWidth) {
      const Floats k = load(tile.k + t * call.k.slot_stride + d);
      for (int r = 0; r < kRows; r++) sum[r] += load(q + r * dim + d) * k;
    }
    for (int r = 0; r < kRows; r++) partial[r][t] = sum[r];
  }
  for (int r = 0; r < kRows; r++) scores[r] = sum_each(partial[r]);
}

// out[r] = fade[r] * out[r] + sum over the tile of weight * V; kCols vectors of kRows rows, from `v` and `out` on.
template <int kRows, int kCols, typename KV>
inline void accumulate(const float (*weights)[kWidth], const Floats* fade, const KV* v, int64_t slot_stride, int count,
                       float* out, int dim) {
  Floats sum[kRows][kCols];
  for (int r = 0; r < kRows; r++)
    for (int c = 0; c < kCols; c++) sum[r][c] = load(out + r * dim + c * kWidth) * fade[r];
  for (int t = 0; t < count; t++) {
    for (int c = 0; c < kCols; c++) {
      const Floats value = load(v + t * slot_stride + c * kWidth);
      for (int r = 0; r < kRows; r++) sum[r][c] += weights[r][t] * value;
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int c = 0; c < kCols; c++) store(out + r * dim + c * kWidth, sum[r][c]);
}

// One tile of online softmax for kRows rows; `q`, `rows` and `out` begin at the first of them.
template <int kRows, int kDim, bool kFull, typename KV>
inline void decode_rows(const Call<KV>& call, const float* q, const Tile<KV>& tile, const Tile<KV>& next, Row* rows,
                        float* out) {
  const int dim = kDim ? kDim : call.dim, count = positions_of<kFull>(tile);
  Floats scores[kRows], fade[kRows];
  float weights[kRows][kWidth];
  score<kRows, kDim, kFull>(call, q, tile, next, scores);
  for (int r = 0; r < kRows; r++) {
    if (!kFull) scores[r] = lane_numbers() < count ? scores[r] : splat(kNothing);
    const Floats peak = larger(largest_lane(scores[r]), rows[r].peak);
    const Floats weight = exp2_of(scores[r] - peak);
    fade[r] = exp2_of(rows[r].peak - peak);
    rows[r] = {peak, rows[r].total * fade[r] + weight};
    store(weights[r], weight);
  }
  int d = 0;
  for (; d + kColumns * kWidth <= dim; d += kColumns * kWidth)
    accumulate<kRows, kColumns>(weights, fade, tile.v + d, call.v.slot_stride, count, out + d, dim);
  for (; d < dim; d += kWidth)
    accumulate<kRows, 1>(weights, fade, tile.v + d, call.v.slot_stride, count, out + d, dim);
}

// One tile for all rows of the group.
template <int kDim, bool kFull, typename KV>
inline void decode_tile(const Call<KV>& call, const float* q, const Tile<KV>& tile, const Tile<KV>& next, Row* rows,
                        float* out) {
  const int dim = kDim ? kDim : call.dim;
  for (int left = call.group(); left > 0; left -= 4, q += 4 * dim, rows += 4, out += 4 * dim) {
    switch (left) {
      case 1: decode_rows<1, kDim, kFull>(call, q, tile, next, rows, out); break;
      case 2: decode_rows<2, kDim, kFull>(call, q, tile, next, rows, out); break;
      case 3: decode_rows<3, kDim, kFull>(call, q, tile, next, rows, out); break;
      default: decode_rows<4, kDim, kFull>(call, q, tile, next, rows, out);
    }
  }
}

// What a span of positions came to, for the G rows of one KV head: merged with the other spans afterwards.
struct Span {
  int sequence, kv_head, begin, end;
};

struct Partial {
  float *peak, *total;  // [G]
  float* out;           // [G, D], not yet divided by the total
};

template <int kDim, typename KV>
void decode(const Call<KV>& call, const Span& span, const Partial& partial, Line* scratch) {
  const int group = call.group(), dim = kDim ? kDim : call.dim;
  float* q = scratch->floats;
  for (int r = 0; r < group; r++) call.read_query(span.sequence, span.kv_head, r, q + r * dim, 1);
  Row* rows = reinterpret_cast<Row*>(scratch + lines(static_cast<size_t>(group) * dim));
  for (int r = 0; r < group; r++) rows[r] = {splat(kNothing), Floats{}};
  std::fill_n(partial.out, static_cast<size_t>(group) * dim, 0.0f);

  const int32_t* table = call.table(span.sequence);
  Tile<KV> tile = tile_at(call, table, span.kv_head, span.begin, span.end), next;
  for (int position = span.begin; position < span.end; tile = next) {
    position += tile.count;
    next = position < span.end ? tile_at(call, table, span.kv_head, position, span.end) : tile;
    if (tile.count == kWidth) {
      decode_tile<kDim, true>(call, q, tile, next, rows, partial.out);
    } else {
      decode_tile<kDim, false>(call, q, tile, next, rows, partial.out);
    }
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
    float peak = kNothing, total = 0;
    for (int i = 0; i < count; i++) peak = std::max(peak, partials[i].peak[r]);
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
