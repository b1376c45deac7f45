// What every kernel of sm_90a here starts with: the host puts this text in front of the source (NVRTC, no headers).
//
// Defined by the host: OUT (of outputs, and of what `widen` reads: 0 bf16, 1 fp16, 2 fp32); BOUNDED, while developing, lets a
// wait that cannot end trap.
// Addresses are 32-bit shared ones (`shared_address`); barriers are mbarriers of this block.

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {  // CUtensorMap, a __grid_constant__ parameter
  u64 opaque[16];
};
// L2 policies: weights that are read once, or again by the next tiles; activations, that every row tile reads.
enum : u64 { EVICT_FIRST = 0x12F0000000000000, EVICT_NORMAL = 0x1000000000000000, EVICT_LAST = 0x14F0000000000000 };

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- clusters and launch order ----
__device__ __forceinline__ u32 in_cluster(u32 address, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() { cluster_arrive(), cluster_wait(); }
__device__ __forceinline__ void cluster_here() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_meet() { cluster_here(), cluster_wait(); }  // where no data is exchanged
__device__ __forceinline__ void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Before this nothing may be read that the kernel ahead wrote, and nothing written that it reads.
__device__ __forceinline__ void wait_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void sync_threads(int barrier, int threads) {  // named barriers 1..15
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
template <int COUNT>
__device__ __forceinline__ void fewer_registers() {  // by whole warpgroups
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- barriers ----
__device__ __forceinline__ void init_barrier(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void fence_barriers() {  // after init_barrier, before copies and the cluster see them
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void fence_for_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  u32 done = 0;
#ifdef BOUNDED
  for (int tries = 0; !done; tries++) {
    if (tries > 1 << 20) __trap();
#else
  while (!done) {
#endif
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Not .release.cluster: that waits for all of the thread's memory traffic, 0.7 us. Products have read what is given free.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(in_cluster(barrier, rank)) : "memory");
}

// ---- copies ----
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
// A box of a map of `nvrtc.bytes_map`, from byte `column` of row `row` on, 128-byte swizzle.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, int column, int row, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], "
      "%5;" ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void store_box(const TensorMap* map, u32 from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from), "r"(column),
               "r"(row)
               : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int LEFT>  // all but LEFT groups have been read from shared memory
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void fetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ uint4 load_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ float load_float(const float* p) {  // not cached as constant: the kernel before this one wrote it
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ float load_shared_float(u32 address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
  return v;
}

// ---- products of a warpgroup ----
__device__ __forceinline__ u64 swizzled_operand(u32 address) {  // shared-memory operand: rows of 128 bytes, swizzled
  return (u64)(address >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>  // all but LEFT groups of products are done
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// ---- inputs and outputs ----
// A tile's place: `order` token tiles before the next row tile.
template <class Arguments>
__device__ __forceinline__ void locate(const Arguments& a, int tile, int& row_tile, int& token_tile) {
  int band = tile / (a.order * a.row_tiles), inside = tile - band * a.order * a.row_tiles;
  int height = max(1, min(a.token_tiles - band * a.order, a.order));
  row_tile = inside / height, token_tile = band * a.order + inside % height;
}
__device__ __forceinline__ float half_value(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ unsigned short half_of(float x) {
  unsigned short y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
// Of the outputs' type.
__device__ __forceinline__ float value(unsigned short x) { return OUT ? half_value(x) : __uint_as_float((u32)x << 16); }
__device__ __forceinline__ void widen(float (&out)[8], const uint4& v) {  // 16-bit values of the outputs' type
  const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (OUT)
      asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
          : "=f"(out[2 * i]), "=f"(out[2 * i + 1])
          : "r"(w[i]));
    else
      out[2 * i] = __uint_as_float(w[i] << 16), out[2 * i + 1] = __uint_as_float(w[i] & 0xFFFF0000u);
  }
}
__device__ __forceinline__ u32 two_halves(float low, float high) {
  u32 both;
  if (OUT == 0)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ void store_one(void* y, size_t at, float a) {
  unsigned short one;
  if (OUT == 0) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(one) : "f"(a));
  if (OUT == 1) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(one) : "f"(a));
  if (OUT == 2)
    ((float*)y)[at] = a;
  else
    ((unsigned short*)y)[at] = one;
}

// ---- rows to int8 ----
__device__ __forceinline__ u32 codes_of(const float* y, float by) {  // adding 1.5 * 2^23 rounds, ties to even
  u32 c[4];
#pragma unroll
  for (int i = 0; i < 4; i++) c[i] = __float_as_uint(__fadd_rn(__fmul_rn(y[i], by), 12582912.f));
  return __byte_perm(__byte_perm(c[0], c[1], 0x0040), __byte_perm(c[2], c[3], 0x0040), 0x5410);
}
__device__ __forceinline__ float larger(float a, float b) {  // a NaN is the largest: it must reach a row's scale
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}
__device__ __forceinline__ float warp_largest(float v) {  // numbers without a sign are ordered as their bits are
  u32 bits;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(bits) : "r"(__float_as_uint(v)));
  return __uint_as_float(bits);
}

// ---- a paged cache ----
__device__ __forceinline__ void prefetch(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// Moves a page of a head to the second-level cache: the `at`-th of the rows' pages, which lie in turn, the newest first, with all
// heads of a page side by side.
template <int heads, int length, int code_bytes, int scale_bytes>
__device__ __forceinline__ void prefetch_page(int at, const int* context, int rows, const int* table, int width, const char* k,
                                              const char* v, const u32* k_params, const u32* v_params) {
  int row = 0, page = at / heads, pages = 0;
  for (; row < rows && page >= (pages = (context[row] + length - 1) / length); row++) page -= pages;
  if (row == rows) return;
  const size_t token = ((size_t)table[(size_t)row * width + pages - 1 - page] * heads + at % heads) * length;
  prefetch(k + token * code_bytes, length * code_bytes), prefetch(v + token * code_bytes, length * code_bytes);
  prefetch((const char*)k_params + token * scale_bytes, length * scale_bytes);
  prefetch((const char*)v_params + token * scale_bytes, length * scale_bytes);
}
