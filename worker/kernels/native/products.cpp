// Products of bfloat16 on a CPU with matrix tiles (Intel AMX): x [T, K] times a weight [N, K], plus a bias [N].
//
// A tile is 16 rows of 64 bytes. One instruction adds to 16 x 16 sums in float32 the products of 16 rows of x and 16 of
// the weight over 32 elements each. The weight lies in the order in which it is read: a panel of 32 of its rows after
// the other, in each panel 32 elements of all its rows after the other, as two tiles whose rows are pairs of elements
// (Intel's manual on optimisation, "Intel AMX": 2D accumulators, VNNI layout). So a few rows of x, which wait for nothing
// but memory, read the weight in one sweep, each line asked for before it is needed.
//
// Invariants:
//   - A sum goes over the elements in their order, 32 at a time, starting with the bias: neither the number of rows, nor the place of
//     a row among them, nor the number of threads changes a bit.
//   - Sums are float32; what is stored is rounded once, or not at all. Subnormal numbers count as zero.

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

#include "call.h"

namespace octavo {

constexpr int kRows = 16;                // of a tile
constexpr int kDepth = 32;               // elements of a tile's row of x
constexpr int kPanel = 2 * kRows;        // rows of the weight that are multiplied together; as many rows of x
constexpr int kStepBytes = 2 * 1024;     // of a panel, for kDepth elements
constexpr int kAhead = 4 * 1024;         // bytes that are asked for before they are needed
constexpr int kFewRows = 32;             // of x: the weight is read once, and memory is what takes time
constexpr int kChunk = 512;              // rows of x that go over one group of panels; a multiple of kPanel
constexpr int64_t kGroupBytes = 1 << 19; // of a group of panels, read again by every kPanel rows: part of a core's L2
constexpr int kUnitsPerThread = 2;       // at least, where there are panels for so many

// In step with native_products.py.
struct Product {
  const BFloat16* x;       // [T, K], rows x_stride apart; K is a multiple of kDepth, filled up with zeros
  const BFloat16* weight;  // in the order above, rows filled up to a multiple of kPanel
  void* out;               // [T, N], contiguous: bfloat16, or float32 if wide
  const float* bias;       // [N], filled up likewise; or null
  Parallel parallel;
  int64_t x_stride;
  int32_t rows, columns, depth, threads, wide;  // T, N, K

  int panels() const { return (columns + kPanel - 1) / kPanel; }
  int64_t panel_bytes() const { return static_cast<int64_t>(depth / kDepth) * kStepBytes; }
};

// Names the shapes of the tiles that `panel_times_rows` works with, and ends their use: a thread that has tiles in use is
// slower to be switched.
class Tiles {
 public:
  explicit Tiles(int rows) {
    alignas(64) Shapes shapes;
    const int first = std::min(rows, kRows), second = rows - first;
    for (int tile : {kSums, kSums + 1, kX}) shapes.set(tile, first);
    for (int tile : {kSums + 2, kSums + 3, kX + 1}) shapes.set(tile, second);
    for (int tile : {kWeight, kWeight + 1}) shapes.set(tile, kRows);
    _tile_loadconfig(&shapes);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  static constexpr int kSums = 0, kX = 4, kWeight = 6;

 private:
  struct Shapes {
    uint8_t palette = 1, first_row = 0, unused[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int count) {
      rows[tile] = static_cast<uint8_t>(count);
      row_bytes[tile] = count ? 64 : 0;
    }
  };
};

// Multiplies a panel by up to kPanel rows of x; kBoth: by more than kRows, in two tiles. The intrinsics want the tiles'
// numbers as they stand: 0 to 3 are the sums, 4 and 5 rows of x, 6 and 7 the panel.
template <bool kBoth>
void panel_times_rows(const Product& p, int panel, int row, int rows, bool cold) {
  const char* weight = reinterpret_cast<const char*>(p.weight) + panel * p.panel_bytes();
  const BFloat16* x = p.x + row * p.x_stride;
  const BFloat16* lower = x + kRows * p.x_stride;
  const int64_t stride = p.x_stride * static_cast<int64_t>(sizeof(BFloat16));
  const int first = panel * kPanel;
  if (p.bias) {  // one row of it for all: a stride of nothing
    _tile_loadd(0, p.bias + first, 0);
    _tile_loadd(1, p.bias + first + kRows, 0);
    if constexpr (kBoth) {
      _tile_loadd(2, p.bias + first, 0);
      _tile_loadd(3, p.bias + first + kRows, 0);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kBoth) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int k = 0; k < p.depth; k += kDepth, weight += kStepBytes) {
    if (cold) {
      for (int i = 0; i < kStepBytes; i += 64) _mm_prefetch(weight + kAhead + i, _MM_HINT_T1);
    }
    _tile_loadd(4, x + k, stride);
    _tile_loadd(6, weight, 64);
    _tile_loadd(7, weight + kStepBytes / 2, 64);
    if constexpr (kBoth) _tile_loadd(5, lower + k, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kBoth) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  alignas(64) float sums[kPanel][kPanel];
  constexpr int kSumStride = sizeof sums[0];
  _tile_stored(0, sums[0], kSumStride);
  _tile_stored(1, sums[0] + kRows, kSumStride);
  if constexpr (kBoth) {
    _tile_stored(2, sums[kRows], kSumStride);
    _tile_stored(3, sums[kRows] + kRows, kSumStride);
  }
  const __mmask32 stored = ~__mmask32{0} >> std::max(0, first + kPanel - p.columns);
  int64_t at = static_cast<int64_t>(row) * p.columns + first;
  for (int i = 0; i < rows; i++, at += p.columns) {
    const __m512 left = _mm512_load_ps(sums[i]), right = _mm512_load_ps(sums[i] + kRows);
    if (p.wide) {
      float* out = static_cast<float*>(p.out) + at;
      _mm512_mask_storeu_ps(out, static_cast<__mmask16>(stored), left);
      _mm512_mask_storeu_ps(out + kRows, static_cast<__mmask16>(stored >> kRows), right);
    } else {
      BFloat16* out = static_cast<BFloat16*>(p.out) + at;
      _mm512_mask_storeu_epi16(out, stored, (__m512i)_mm512_cvtne2ps_pbh(right, left));
    }
  }
}

void multiply(const Product& p) {
  const bool few = p.rows <= kFewRows;
  const int panels = p.panels();
  const int fit = static_cast<int>(std::max<int64_t>(1, kGroupBytes / std::max<int64_t>(1, p.panel_bytes())));
  const int fair = std::max(1, panels / (kUnitsPerThread * std::max(1, p.threads)));
  const int group = few ? 1 : std::min(fit, fair), groups = (panels + group - 1) / group;
  const int chunk = few ? kFewRows : kChunk, chunks = (p.rows + chunk - 1) / chunk;
  for_each_in_order({p.parallel, p.threads}, groups * chunks, [&](int unit) {
    const int first = unit / chunks * group, last = std::min(panels, first + group);
    const int begin = unit % chunks * chunk, end = std::min(p.rows, begin + chunk);
    for (int row = begin; row < end; row += kPanel) {
      const int rows = std::min(kPanel, end - row);
      const Tiles tiles(rows);
      for (int panel = first; panel < last; panel++) {
        if (rows > kRows) {
          panel_times_rows<true>(p, panel, row, rows, row == begin);
        } else {
          panel_times_rows<false>(p, panel, row, rows, row == begin);
        }
      }
    }
  });
}

}  // namespace octavo

#define OCTAVO_EXPORT extern "C" __attribute__((visibility("default")))

// Whether the system lets this process use tiles: Linux wants to be asked, for their state is large (arch_prctl(2)).
OCTAVO_EXPORT int octavo_permit_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Returns 0.
OCTAVO_EXPORT int octavo_multiply(const octavo::Product* p) {
  octavo::multiply(*p);
  return 0;
}
