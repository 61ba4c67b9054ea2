// Chunk: many rows of one sequence and KV head attend at once.
//
// Bound by arithmetic. The rows (query, head) lie across the vector lanes. Some positions of K and V at a time are
// copied out of their blocks; what is left are two small matrix products with a softmax between them that never
// crosses a lane.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "call.h"

namespace octavo {

constexpr int kLanes = 64;  // rows of a tile
constexpr int kPanel = 64;  // positions that are copied out of the pool at a time; a fixed cut, see paged_attention.cpp

// Rows [first_row, first_row + kLanes) of a sequence's KV head, fewer at its end.
struct Chunk {
  int sequence, kv_head, first_row;
};

// Four rows and kCols vectors of out[m][lane] += sum over k < depth of a[m * a_row + k * a_step] * b[k][lane].
template <int kCols>
inline void add_product_tile(const float* a, int64_t a_row, int64_t a_step, const float* b, float* out, int depth) {
  Floats sum[4][kCols];
  for (int m = 0; m < 4; m++)
    for (int c = 0; c < kCols; c++) sum[m][c] = load(out + m * kLanes + c * kWidth);
  for (int k = 0; k < depth; k++) {
    Floats column[kCols];
    for (int c = 0; c < kCols; c++) column[c] = load(b + k * kLanes + c * kWidth);
    for (int m = 0; m < 4; m++) {
      const float factor = a[m * a_row + k * a_step];
      for (int c = 0; c < kCols; c++) sum[m][c] += factor * column[c];
    }
  }
  for (int m = 0; m < 4; m++)
    for (int c = 0; c < kCols; c++) store(out + m * kLanes + c * kWidth, sum[m][c]);
}

// The same for `height` rows (a multiple of 4) and the first `lanes` lanes (a multiple of kWidth).
inline void add_product(const float* a, int64_t a_row, int64_t a_step, const float* b, float* out, int height,
                        int lanes, int depth) {
  for (int m = 0; m < height; m += 4) {
    const float* rows = a + m * a_row;
    int lane = 0;
    for (; lane + kColumns * kWidth <= lanes; lane += kColumns * kWidth)
      add_product_tile<kColumns>(rows, a_row, a_step, b + lane, out + m * kLanes + lane, depth);
    for (; lane < lanes; lane += kWidth)
      add_product_tile<1>(rows, a_row, a_step, b + lane, out + m * kLanes + lane, depth);
  }
}

// Where a chunk keeps its numbers; those of rows are laid out with the rows fastest.
struct Bench {
  float *q, *out;       // [D, kLanes]
  float *k, *v;         // [kPanel, D]
  float* scores;        // [kPanel, kLanes]
  float *peak, *total;  // [kLanes]
  int32_t* visible;     // [kLanes]: a row sees positions below this

  static size_t floats(int dim) { return static_cast<size_t>(dim) * (2 * kLanes + 2 * kPanel) + (kPanel + 3) * kLanes; }

  Bench(Line* scratch, int dim) {
    q = scratch->floats;
    out = q + dim * kLanes;
    k = out + dim * kLanes;
    v = k + dim * kPanel;
    scores = v + dim * kPanel;
    peak = scores + kPanel * kLanes;
    total = peak + kLanes;
    visible = reinterpret_cast<int32_t*>(total + kLanes);
  }
};

// Copies positions [begin, begin + count) of one KV head out of their blocks.
template <typename KV>
void gather(const Call<KV>& call, const Chunk& chunk, int begin, int count, const Bench& bench) {
  const int dim = call.dim;
  const int32_t* table = call.table(chunk.sequence);
  for (int i = 0; i < count;) {
    const Tile<KV> tile = tile_at(call, table, chunk.kv_head, begin + i, begin + count);
    for (int t = 0; t < tile.count; t++, i++) {
      for (int d = 0; d < dim; d += kWidth) {
        store(bench.k + i * dim + d, load(tile.k + t * call.k.slot_stride + d));
        store(bench.v + i * dim + d, load(tile.v + t * call.v.slot_stride + d));
      }
    }
  }
}

// Turns the scores of positions [begin, begin + count) into weights, and fades what was summed before to the new peak.
inline void soften(const Bench& bench, int begin, int count, int lanes, int dim) {
  for (int lane = 0; lane < lanes; lane += kWidth) {
    Ints visible;
    std::memcpy(&visible, bench.visible + lane, sizeof visible);
    const Floats before = load(bench.peak + lane);
    Floats peak = before;
    for (int t = 0; t < count; t++) {
      float* at = bench.scores + t * kLanes + lane;
      const Floats score = begin + t < visible ? load(at) : splat(kNothing);
      peak = larger(score, peak);
      store(at, score);
    }
    const Floats fade = exp2_of(before - peak);
    Floats total = load(bench.total + lane) * fade;
    for (int t = 0; t < count; t++) {
      float* at = bench.scores + t * kLanes + lane;
      const Floats weight = exp2_of(load(at) - peak);
      total += weight;
      store(at, weight);
    }
    store(bench.peak + lane, peak);
    store(bench.total + lane, total);
    for (int d = 0; d < dim; d++) {
      float* at = bench.out + d * kLanes + lane;
      store(at, load(at) * fade);
    }
  }
}

template <typename KV>
void attend_chunk(const Call<KV>& call, const Chunk& chunk, Line* scratch) {
  const int dim = call.dim, group = call.group(), queries = call.queries(chunk.sequence);
  const int rows = std::min(kLanes, queries * group - chunk.first_row);
  const int lanes = (rows + kWidth - 1) / kWidth * kWidth;
  const int history = call.lengths[chunk.sequence] - queries;
  const Bench bench(scratch, dim);
  for (int lane = 0; lane < lanes; lane++) {
    const int row = chunk.first_row + std::min(lane, rows - 1);  // lanes left over repeat the last row, unread
    call.read_query(chunk.sequence, chunk.kv_head, row, bench.q + lane, kLanes);
    bench.visible[lane] = history + row / group + 1;
    bench.peak[lane] = kNothing;
    bench.total[lane] = 0.0f;
  }
  std::fill_n(bench.out, static_cast<size_t>(dim) * kLanes, 0.0f);

  const int end = bench.visible[rows - 1];
  for (int begin = 0; begin < end; begin += kPanel) {
    const int count = std::min(kPanel, end - begin);
    gather(call, chunk, begin, count, bench);
    std::fill_n(bench.scores, kPanel * kLanes, 0.0f);
    // Rounded up to whole tiles: what the last rows of the panel hold gives scores that nobody reads.
    add_product(bench.k, dim, 1, bench.q, bench.scores, (count + 3) / 4 * 4, lanes, dim);
    soften(bench, begin, count, lanes, dim);
    add_product(bench.v, 1, dim, bench.scores, bench.out, dim, lanes, count);
  }
  for (int lane = 0; lane < rows; lane++) {
    const int row = chunk.first_row + lane;
    call.write_result(chunk.sequence, chunk.kv_head, row, bench.out + lane, kLanes, bench.total[lane]);
  }
}

}  // namespace octavo
