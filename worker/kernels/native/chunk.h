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

constexpr int kLanes = 48;  // rows of a tile
constexpr int kPanel = 64;  // positions that are copied out of the pool at a time; a fixed cut, see paged_attention.cpp

// Rows [first_row, first_row + kLanes) of a sequence's KV head, fewer at its end.
struct Chunk {
  int sequence, kv_head, first_row;
};

// Factor k of row m of a product lies at data[m * row + k * step].
struct Factors {
  const float* data;
  int64_t row, step;
};

// kHeight rows and kCols vectors of out[m][lane] = out[m][lane] * fade[lane] + sum over k < depth of a(m, k) * b[k][lane].
// Without `fade` what `out` held counts for nothing.
template <int kCols>
inline void product_tile(const Factors& a, const float* b, const float* fade, float* out, int depth) {
  Floats sum[kHeight][kCols] = {};
  if (fade) {
#pragma GCC unroll 8
    for (int m = 0; m < kHeight; m++)
#pragma GCC unroll 3
      for (int c = 0; c < kCols; c++) sum[m][c] = load(out + m * kLanes + c * kWidth) * load(fade + c * kWidth);
  }
  for (int k = 0; k < depth; k++) {
    Floats column[kCols];
#pragma GCC unroll 3
    for (int c = 0; c < kCols; c++) column[c] = load(b + k * kLanes + c * kWidth);
#pragma GCC unroll 8
    for (int m = 0; m < kHeight; m++) {
      const float factor = a.data[m * a.row + k * a.step];
#pragma GCC unroll 3
      for (int c = 0; c < kCols; c++) sum[m][c] += factor * column[c];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kHeight; m++)
#pragma GCC unroll 3
    for (int c = 0; c < kCols; c++) store(out + m * kLanes + c * kWidth, sum[m][c]);
}

// The same for `height` rows (a multiple of kHeight) and the first `lanes` lanes (a multiple of kWidth).
inline void product(const Factors& a, const float* b, const float* fade, float* out, int height, int lanes, int depth) {
  for (int m = 0; m < height; m += kHeight) {
    const Factors rows = {a.data + m * a.row, a.row, a.step};
    int lane = 0;
    for (; lane + kColumns * kWidth <= lanes; lane += kColumns * kWidth)
      product_tile<kColumns>(rows, b + lane, fade ? fade + lane : nullptr, out + m * kLanes + lane, depth);
    for (; lane < lanes; lane += kWidth)
      product_tile<1>(rows, b + lane, fade ? fade + lane : nullptr, out + m * kLanes + lane, depth);
  }
}

// Where a chunk keeps its numbers; those of rows are laid out with the rows fastest.
struct Bench {
  float *q, *out;              // [D, kLanes]
  float *k, *v;                // [kPanel, D]
  float* scores;               // [kPanel, kLanes]
  float *peak, *total, *fade;  // [kLanes]
  int32_t *first, *end;        // [kLanes]: a row sees positions [first, end)

  static size_t floats(int dim) { return static_cast<size_t>(dim) * (2 * kLanes + 2 * kPanel) + (kPanel + 5) * kLanes; }

  Bench(Line* scratch, int dim) {
    q = scratch->floats;
    out = q + dim * kLanes;
    k = out + dim * kLanes;
    v = k + dim * kPanel;
    scores = v + dim * kPanel;
    peak = scores + kPanel * kLanes;
    total = peak + kLanes;
    fade = total + kLanes;
    first = reinterpret_cast<int32_t*>(fade + kLanes);
    end = first + kLanes;
  }
};

// Copies positions [begin, end) of one KV head out of their blocks, to the rows of the panel that begins at `panel`.
template <typename KV>
void gather(const Call<KV>& call, const Chunk& chunk, int panel, int begin, int end, const Bench& bench) {
  const int dim = call.dim;
  const int32_t* table = call.table(chunk.sequence);
  for (int position = begin; position < end;) {
    const int32_t block = table[position / call.block_size];
    const int offset = position % call.block_size, count = std::min(call.block_size - offset, end - position);
    const KV *k = call.k.slot(block, chunk.kv_head, offset), *v = call.v.slot(block, chunk.kv_head, offset);
    for (int t = 0; t < count; t++, position++, k += call.k.slot_stride, v += call.v.slot_stride) {
      const int64_t at = static_cast<int64_t>(position - panel) * dim;
      for (int d = 0; d < dim; d += kWidth) {
        store(bench.k + at + d, load(k + d));
        store(bench.v + at + d, load(v + d));
      }
    }
  }
}

// Turns the scores of positions [begin, begin + count) into weights, and finds what fades earlier sums to the new peak.
// kMasked: some row does not see some of the positions.
template <bool kMasked>
inline void soften(const Bench& bench, int begin, int count, int lanes) {
  for (int lane = 0; lane < lanes; lane += kWidth) {
    Ints first, end;
    std::memcpy(&first, bench.first + lane, sizeof first);
    std::memcpy(&end, bench.end + lane, sizeof end);
    const Floats before = load(bench.peak + lane);
    Floats peak = before;
    for (int t = 0; t < count; t++) {
      float* at = bench.scores + t * kLanes + lane;
      Floats score = load(at);
      if (kMasked) {
        const Ints position = Ints{} + (begin + t);
        score = (position >= first) & (position < end) ? score : splat(kNothing);
        store(at, score);
      }
      peak = larger(score, peak);
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
    store(bench.fade + lane, fade);
  }
}

// Reads the queries and lays out what the rows begin with. Lanes left over repeat the last row; nobody reads them.
template <typename KV>
void open(const Call<KV>& call, const Chunk& chunk, int rows, int lanes, const Bench& bench) {
  const int group = call.group(), history = call.lengths[chunk.sequence] - call.queries(chunk.sequence);
  for (int lane = 0; lane < lanes; lane++) {
    const int row = chunk.first_row + std::min(lane, rows - 1), position = history + row / group;
    call.read_query(chunk.sequence, chunk.kv_head, row, bench.q + lane, kLanes);
    bench.first[lane] = call.first_visible(position);
    bench.end[lane] = position + 1;
    const float sink = call.sink(call.head(chunk.kv_head, row));
    bench.peak[lane] = std::max(sink, kLowest);
    bench.total[lane] = sink > kLowest ? 1.0f : 0.0f;
  }
  std::fill_n(bench.out, static_cast<size_t>(call.dim) * kLanes, 0.0f);
}

template <typename KV>
void attend_chunk(const Call<KV>& call, const Chunk& chunk, Line* scratch) {
  const int dim = call.dim;
  const int rows = std::min(kLanes, call.queries(chunk.sequence) * call.group() - chunk.first_row);
  const int lanes = (rows + kWidth - 1) / kWidth * kWidth;
  const Bench bench(scratch, dim);
  open(call, chunk, rows, lanes, bench);

  const int first = bench.first[0], end = bench.end[rows - 1];
  for (int panel = first / kPanel * kPanel; panel < end; panel += kPanel) {
    const int count = std::min(kPanel, end - panel);
    if (panel < first) {  // what lies before may be another sequence's by now, and 0 * NaN is NaN
      std::fill_n(bench.k, static_cast<size_t>(first - panel) * dim, 0.0f);
      std::fill_n(bench.v, static_cast<size_t>(first - panel) * dim, 0.0f);
    }
    gather(call, chunk, panel, std::max(panel, first), panel + count, bench);
    // Rounded up to whole tiles: what the last rows of the panel hold gives scores that nobody reads.
    const int height = (count + kHeight - 1) / kHeight * kHeight;
    product({bench.k, dim, 1}, bench.q, nullptr, bench.scores, height, lanes, dim);
    if (call.soft_cap != 0.0f) {
      for (float* at = bench.scores; at < bench.scores + count * kLanes; at += kWidth)
        store(at, capped(load(at), call.soft_cap));
    }
    if (panel >= bench.first[rows - 1] && panel + count <= bench.end[0]) {
      soften<false>(bench, panel, count, lanes);
    } else {
      soften<true>(bench, panel, count, lanes);
    }
    product({bench.v, 1, dim}, bench.scores, bench.fade, bench.out, dim, lanes, count);
  }
  for (int lane = 0; lane < rows; lane++)
    call.write_result(chunk.sequence, chunk.kv_head, chunk.first_row + lane, bench.out + lane, kLanes,
                      bench.total[lane]);
}

}  // namespace octavo
