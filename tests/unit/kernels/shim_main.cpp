// The page kernels as C++ under sanitizers: buffers of exactly the size they need, several geometries and grids, compared
// with plain loops. Device addresses are the host's here, so that AddressSanitizer sees every access.
#define KVDEV_SHIM
#include "pages.hip"

#include <cstdio>
#include <cstdlib>
#include <vector>

void* kvdev_shim_translate(kv_u64 address, size_t size, bool) {
  if (address % size) {
    std::printf("misaligned access of %zu bytes\n", size);
    std::abort();
  }
  return reinterpret_cast<void*>(address);
}

static kv_divisor divisor(kv_u32 value) {
  kv_u32 shift = 0;
  while ((kv_u64(1) << shift) < value) ++shift;
  return {value, kv_u32(((kv_u64(1) << 32) * ((kv_u64(1) << shift) - value)) / value + 1), shift};
}

static kv_u64 state = 20260131;
static kv_u8 next_byte() {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return kv_u8(state >> 56);
}

template <class F, class P> static void launch(F kernel, const P& parameters) {
  for (kvdev_shim_now.workgroup = 0; kvdev_shim_now.workgroup < parameters.workgroup_count; ++kvdev_shim_now.workgroup)
    for (kvdev_shim_now.thread = 0; kvdev_shim_now.thread < KV_THREADS; ++kvdev_shim_now.thread) kernel(parameters);
}

static kv_u64 total(const std::vector<kv_u8>& bytes) {
  kv_u64 sum = 0;
  for (size_t at = 0; at < bytes.size(); at += 8) {
    kv_u64 word = 0;
    for (size_t i = 0; i < 8 && at + i < bytes.size(); ++i) word |= kv_u64(bytes[at + i]) << (8 * i);
    word ^= (at / 8 + 1) * 0x9E3779B97F4A7C15ull;
    sum += ((kv_u64(1) << 32) + (word & 0xffffffff)) * ((kv_u64(1) << 32) + (word >> 32));
  }
  return sum;
}

static void expect(bool is_so, const char* what, int index) {
  if (!is_so) {
    std::printf("case %d: %s\n", index, what);
    std::exit(1);
  }
}

struct Case {
  kv_u32 planes, blocks, tokens, heads, run, gap, block_count, pages, workgroups;
};

int main() {
  const Case cases[] = {
      {3, 2, 1, 1, 64, 0, 9, 3, 1},      {2, 3, 4, 5, 32, 16, 17, 2, 3}, {1, 1, 1, 1, 16400, 16, 2, 1, 2},
      {5, 1, 16, 2, 132, 4, 8, 2, 2},    {2, 2, 3, 1, 7, 1, 11, 2, 1},   {4, 2, 1, 3, 4112, 48, 8, 2, 7},
      {1, 1, 1, 1, 1, 0, 1, 1, 1},
  };
  int index = 0;
  for (const Case& c : cases) {
    const kv_u64 head_stride = c.run + c.gap, token_stride = head_stride * c.heads + c.gap;
    const kv_u64 block_stride = token_stride * c.tokens;
    const kv_u64 span = block_stride * c.block_count;
    const size_t page_size = size_t(c.planes) * c.blocks * c.tokens * c.heads * c.run;
    const kv_u32 width = c.run % 16 == 0 && c.gap % 16 == 0 ? 16 : c.run % 4 == 0 && c.gap % 4 == 0 ? 4 : 1;
    std::vector<kv_u8*> tensors;
    std::vector<kv_plane> planes;
    for (kv_u32 p = 0; p < c.planes; ++p) {
      tensors.push_back(static_cast<kv_u8*>(std::malloc(span)));
      for (kv_u64 i = 0; i < span; ++i) tensors.back()[i] = next_byte();
      planes.push_back({reinterpret_cast<kv_u64>(tensors.back()), block_stride});
    }
    std::vector<kv_i64> table(c.pages * c.blocks);
    for (size_t i = 0; i < table.size(); ++i) table[i] = kv_i64((i * 5 + 3) % c.block_count);
    if (c.pages > 1) table[1] = -1;
    std::vector<kv_u8*> staging;
    std::vector<kv_u64> pages, totals(c.pages), expected(c.pages);
    std::vector<kv_u32> differs(c.pages, 7);
    std::vector<std::vector<kv_u8>> gathered(c.pages);
    for (kv_u32 page = 0; page < c.pages; ++page) {
      staging.push_back(static_cast<kv_u8*>(std::malloc(page_size)));
      pages.push_back(reinterpret_cast<kv_u64>(staging.back()));
      for (kv_u32 p = 0; p < c.planes; ++p)
        for (kv_u32 b = 0; b < c.blocks; ++b)
          for (kv_u32 t = 0; t < c.tokens; ++t)
            for (kv_u32 h = 0; h < c.heads; ++h)
              for (kv_u32 i = 0; i < c.run; ++i) {
                const kv_i64 block = table[page * c.blocks + b];
                const kv_u64 at = kv_u64(block) * block_stride + t * token_stride + h * head_stride + i;
                gathered[page].push_back(block < 0 ? 0 : tensors[p][at]);
              }
    }
    kv_u64 done = 0;
    kv_shape s = {};
    s.planes = reinterpret_cast<kv_u64>(planes.data());
    s.block_table = reinterpret_cast<kv_u64>(table.data());
    s.pages = reinterpret_cast<kv_u64>(pages.data());
    s.totals = reinterpret_cast<kv_u64>(totals.data());
    s.done = reinterpret_cast<kv_u64>(&done);
    s.token_stride = token_stride;
    s.head_stride = head_stride;
    s.page_size = page_size;
    s.run_units = divisor(c.run / width);
    s.heads = divisor(c.heads);
    s.tokens = divisor(c.tokens);
    s.blocks = divisor(c.blocks);
    s.unit_count = kv_u32(page_size / width);
    const kv_u32 tiles = (s.unit_count + KV_THREADS * KV_UNROLL - 1) / (KV_THREADS * KV_UNROLL);
    s.page_tiles = divisor(tiles);
    s.tile_count = tiles * c.pages;
    s.workgroup_count = c.workgroups;
    launch(width == 16 ? kvdev_pack16_sum : width == 4 ? kvdev_pack4 : kvdev_pack1, s);
    expect(done == s.tile_count, "pack did not report its tiles", index);
    for (kv_u32 page = 0; page < c.pages; ++page)
      expect(std::memcmp(staging[page], gathered[page].data(), page_size) == 0, "packed bytes differ", index);

    kv_shape sums = s;
    sums.unit_count = kv_u32((page_size + 15) / 16);
    const kv_u32 sum_tiles = (sums.unit_count + KV_THREADS * KV_UNROLL - 1) / (KV_THREADS * KV_UNROLL);
    sums.page_tiles = divisor(sum_tiles);
    sums.tile_count = sum_tiles * c.pages;
    if (width == 16)
      for (kv_u32 page = 0; page < c.pages; ++page)
        expect(totals[page] == total(gathered[page]), "fused totals differ", index);
    totals.assign(c.pages, 0);
    launch(kvdev_sum, sums);
    for (kv_u32 page = 0; page < c.pages; ++page)
      expect(totals[page] == total(gathered[page]), "totals differ", index);
    kv_check check = {s.totals, 0, 0, page_size, c.pages, 1};
    launch(kvdev_check, check);
    expected = totals;
    expected[0] ^= 1;
    totals.assign(c.pages, 0);
    launch(kvdev_sum, sums);
    check.expected = reinterpret_cast<kv_u64>(expected.data());
    check.differs = reinterpret_cast<kv_u64>(differs.data());
    launch(kvdev_check, check);
    for (kv_u32 page = 0; page < c.pages; ++page) expect(differs[page] == (page == 0), "a verdict is wrong", index);

    std::vector<std::vector<kv_u8>> before;
    for (kv_u8* tensor : tensors) before.emplace_back(tensor, tensor + span);
    for (kv_u32 page = 0; page < c.pages; ++page)
      for (size_t i = 0; i < page_size; ++i) gathered[page][i] = staging[page][i] = next_byte();
    launch(width == 16 ? kvdev_unpack16 : width == 4 ? kvdev_unpack4 : kvdev_unpack1, s);
    for (kv_u32 page = 0; page < c.pages; ++page) {
      size_t at = 0;
      for (kv_u32 p = 0; p < c.planes; ++p)
        for (kv_u32 b = 0; b < c.blocks; ++b)
          for (kv_u32 t = 0; t < c.tokens; ++t)
            for (kv_u32 h = 0; h < c.heads; ++h)
              for (kv_u32 i = 0; i < c.run; ++i, ++at) {
                const kv_i64 block = table[page * c.blocks + b];
                if (block >= 0)
                  before[p][kv_u64(block) * block_stride + t * token_stride + h * head_stride + i] = gathered[page][at];
              }
    }
    for (kv_u32 p = 0; p < c.planes; ++p)
      expect(std::memcmp(tensors[p], before[p].data(), span) == 0, "unpacked bytes differ", index);
    for (kv_u8* each : tensors) std::free(each);
    for (kv_u8* each : staging) std::free(each);
    ++index;
  }
  std::printf("%d cases\n", index);
}
