// Which token each row draws, on Hopper: temperature, top-k, top-p, min-p and Gumbel noise in one launch. `sm90.cuh` goes first.
//
// A cluster of CLUSTER blocks has a row and keeps it. What the blocks agree on (the largest logit, the border of top-k and top-p,
// the winner) is stored into each other's shared memory, where a barrier counts the bytes: a barrier of the cluster would wait
// for all memory traffic, 0.7 us. All of it is integers or maxima, so no order matters. Tokens are compared as keys of 50 bits:
// a logit's bits, made to sort, over the token counted from behind: no two are equal.
//
// Defined by the host: WIDTH (logits of a row), CLUSTER (2, 4, 8).

constexpr int THREADS = 512, LANES = THREADS * CLUSTER, ITEMS = (WIDTH + 4 * LANES - 1) / (4 * LANES) * 4;
constexpr int WARPS = THREADS / 32, TOKEN_BITS = 18, LISTED = 1024;
constexpr int BINS = 1920, OWN_BINS = BINS / CLUSTER, EACH = (OWN_BINS + THREADS - 1) / THREADS;  // of a block, of a thread
constexpr u32 LAST_TOKEN = (1u << TOKEN_BITS) - 1;
constexpr float PER_NAT = 64;  // bins of a unit of logits, or of logits over temperature
constexpr float LOG2_E = 1.44269504f;
static_assert(WIDTH <= 1 << TOKEN_BITS, "");

struct Arguments {
  const float *logits, *temperature, *top_p, *min_p;
  const long long *top_k, *keys;
  long long* out;
};
struct Found {  // the bin with the border, what is above it, keys in it, and where a block's go in the list
  u64 bin, above, many, first;
};
enum { COUNTS, LOWS, HIGHS };                // of a bin: its keys, and their masses' low 15 bits and the rest
enum { ROOM, OTHER_ROOM, BIN, FOUND, LIST, BORDER, BARRIERS };  // barriers

__shared__ __align__(8) u64 barriers[BARRIERS], rooms[2][CLUSTER * WARPS];
__shared__ u32 leading, listed;  // the best of the block so far, made to sort
__shared__ __align__(16) u32 bins[3 * BINS];  // of this block's keys; once they are sent a list of one bin's
__shared__ Found found;
__shared__ u64 border;
extern __shared__ __align__(16) u32 dynamic[];  // of this block's own bins, from every block; the block's part of the row
#define PARTS(kind, from) (dynamic + (kind) * BINS + (from) * OWN_BINS)
#define X(i) ((float*)dynamic)[3 * BINS + (i) * THREADS + threadIdx.x]
#define EACH_ITEM _Pragma("unroll 4") for (int i = 0; i < ITEMS; i++)
#define TOKEN(i) ((i) * LANES + rank * THREADS + threadIdx.x)

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7F800000); }
__device__ __forceinline__ u32 sortable(float x) {
  u32 bits = __float_as_uint(x + 0.f);  // -0 is 0
  return bits ^ ((int)bits < 0 ? ~0u : 1u << 31);
}
__device__ __forceinline__ float sorted_value(u32 bits) { return __uint_as_float(bits ^ ((int)bits < 0 ? 1u << 31 : ~0u)); }
__device__ __forceinline__ u64 key_of(u32 sorts, u32 token) { return (u64)sorts << TOKEN_BITS | (LAST_TOKEN - token); }
__device__ __forceinline__ u32 warp_most(u32 v) {
  u32 most;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(v));
  return most;
}

__device__ __forceinline__ u32 barrier_of(int which) { return shared_address(barriers + which); }
__device__ __forceinline__ void send(const void* place, u64 value, int barrier, u32 to) {
  const u32 there = in_cluster(shared_address(place), to), counts = in_cluster(barrier_of(barrier), to);
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u64 [%0], %1, [%2];" ::"r"(there), "l"(value), "r"(counts)
               : "memory");
}
// Every warp's value to every block, or the `last` time to the first one alone; in what order they come does not matter:
// a block is never more than one exchange ahead.
__device__ __forceinline__ const u64* exchange(u64 value, int& turn, u32 rank, bool last = false) {
  const u32 lane = threadIdx.x % 32, which = turn % 2;
  u64* room = rooms[which];
  if (threadIdx.x == 0) expect(barrier_of(which), sizeof rooms[0]);
  if (lane < (last ? 1 : CLUSTER)) send(room + rank * WARPS + threadIdx.x / 32, value, which, lane);
  if (!last || rank == 0) wait(barrier_of(which), turn / 2 % 2);
  turn++;
  return room;
}
__device__ __forceinline__ u64 warp_sum(u64 v) {
#pragma unroll
  for (int apart = 16; apart; apart /= 2) v += __shfl_xor_sync(~0u, v, apart);
  return v;
}
__device__ __forceinline__ u64 largest_of(const u64* room) {
  u64 most = 0;
#pragma unroll
  for (int i = threadIdx.x % 32; i < CLUSTER * WARPS; i += 32) most = max(most, room[i]);
#pragma unroll
  for (int apart = 16; apart; apart /= 2) most = max(most, __shfl_xor_sync(~0u, most, apart));
  return most;
}
__device__ __forceinline__ u64 sum_of(const u64* room, u32 count) {  // of its first
  u64 sum = 0;
#pragma unroll
  for (u32 i = threadIdx.x % 32; i < CLUSTER * WARPS; i += 32) sum += i < count ? room[i] : 0;
  return warp_sum(sum);
}

__device__ __forceinline__ u32 mixed(u32 x) {  // the finalizer of MurmurHash3 (public domain)
  x = (x ^ x >> 16) * 0x85EBCA6Bu;
  x = (x ^ x >> 13) * 0xC2B2AE35u;
  return x ^ x >> 16;
}

struct Row {
  float largest, sharpness;
  u32 rank;
};
__device__ __forceinline__ u32 mass(float x, const Row& row) {  // of probability: the largest logit's is 2^30
  return __float2uint_rz(__expf((x - row.largest) * row.sharpness) * 0x1p30f);
}
template <bool MASS>
__device__ __forceinline__ int bin_of(float x, const Row& row) {  // falls as x grows
  const float below = row.largest - x;
  return (int)fminf((MASS ? below * row.sharpness : below) * PER_NAT, BINS - 1.f);
}
// The lowest key that is kept when keys from the largest down are kept until they weigh enough: `share` keys, or MASS that part
// of the mass, out of those from `lowest` up. The bin in which this happens is found first, each block adding up its part of
// the bins, then the key in a list of the bin's, or where they are too many bit by bit.
template <bool MASS>
__device__ u64 border_of(u64 lowest, double share, const Row& row, int& turn, int parity) {
  const u32 thread = threadIdx.x, rank = row.rank;
  constexpr int KINDS = MASS ? 3 : 1;
  for (int i = thread; i < KINDS * BINS; i += THREADS) bins[i] = 0;
  if (thread == 0) listed = 0, expect(barrier_of(BIN), KINDS * BINS * 4), expect(barrier_of(FOUND), sizeof found);
  __syncthreads();
  EACH_ITEM {
    const float x = X(i);
    if (TOKEN(i) < WIDTH && key_of(sortable(x), TOKEN(i)) >= lowest) {
      const u32 weight = MASS ? mass(x, row) : 1;
      const int bin = bin_of<MASS>(x, row);
      if (weight) {
        atomicAdd(bins + bin, 1);
        if (MASS) atomicAdd(bins + LOWS * BINS + bin, weight & 0x7FFF), atomicAdd(bins + HIGHS * BINS + bin, weight >> 15);
      }
    }
  }
  fence_for_copies();
  __syncthreads();
  if (thread < KINDS * CLUSTER) {
    const u32 kind = thread / CLUSTER, to = thread % CLUSTER;
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     in_cluster(shared_address(PARTS(kind, rank)), to)),
                 "r"(shared_address(bins + kind * BINS + to * OWN_BINS)), "r"(OWN_BINS * 4), "r"(in_cluster(barrier_of(BIN), to))
                 : "memory");
  }
  wait(barrier_of(BIN), parity);
  u64 sums[EACH], all = 0;
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    sums[j] = 0;
#pragma unroll
    for (int from = 0; from < CLUSTER; from++) {
      const u32 bin = EACH * thread + j;
      if (bin < OWN_BINS) sums[j] += MASS ? PARTS(LOWS, from)[bin] + ((u64)PARTS(HIGHS, from)[bin] << 15) : PARTS(COUNTS, from)[bin];
    }
    all += sums[j];
  }
  u64 upto = all;
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    const u64 before = __shfl_up_sync(~0u, upto, apart);
    if (thread % 32 >= apart) upto += before;
  }
  const u64* room = exchange(__shfl_sync(~0u, upto, 31), turn, rank);
  const u64 total = sum_of(room, CLUSTER * WARPS);
  const u64 wanted = MASS ? max((u64)ceil(share * (double)total), 1ull) : min((u64)share, total);
  u64 before = sum_of(room, rank * WARPS + thread / 32) + upto - all;
#pragma unroll
  for (int j = 0; j < EACH; j++) {
    if (before < wanted && before + sums[j] >= wanted) {  // one thread of the cluster
      const u32 bin = EACH * thread + j;
      u32 many = 0, first = 0;
      for (u32 from = 0; from < CLUSTER; from++) many += PARTS(COUNTS, from)[bin];
      for (u32 to = 0; to < CLUSTER; first += PARTS(COUNTS, to++)[bin])
        send(&found.bin, rank * OWN_BINS + bin, FOUND, to), send(&found.above, before, FOUND, to),
            send(&found.many, many, FOUND, to), send(&found.first, first, FOUND, to);
    }
    before += sums[j];
  }
  wait(barrier_of(FOUND), parity);
  const int bin = (int)found.bin;
  const u64 above = found.above;
  const u32 many = (u32)found.many, first = (u32)found.first;
  if (many > LISTED) {  // hundreds of equal logits
    if (thread == 0) arrive(barrier_of(LIST)), arrive(barrier_of(BORDER));
    u64 prefix = 0;
    for (int bit = 31 + TOKEN_BITS; bit >= 0; bit--) {
      const u64 tried = prefix | 1ull << bit;
      u64 weight = 0;
      EACH_ITEM {
        const u64 key = key_of(sortable(X(i)), TOKEN(i));
        if (TOKEN(i) < WIDTH && key >= tried && key >= lowest) weight += MASS ? mass(X(i), row) : 1;
      }
      if (sum_of(exchange(warp_sum(weight), turn, rank), CLUSTER * WARPS) >= wanted) prefix = tried;
    }
    return prefix;
  }
  u64* list = (u64*)bins;
  u32* weights = bins + 2 * LISTED;
  if (thread == 0) expect(barrier_of(LIST), many * 8), expect(barrier_of(BORDER), 8);
  EACH_ITEM {
    const float x = X(i);
    const u64 key = key_of(sortable(x), TOKEN(i));
    if (TOKEN(i) < WIDTH && bin_of<MASS>(x, row) == bin && key >= lowest && (!MASS || mass(x, row))) {
      const u32 place = first + atomicAdd(&listed, 1);
#pragma unroll
      for (u32 to = 0; to < CLUSTER; to++) send(list + place, key, LIST, to);
    }
  }
  wait(barrier_of(LIST), parity);
  for (u32 i = thread; i < many; i += THREADS) weights[i] = MASS ? mass(sorted_value(list[i] >> TOKEN_BITS), row) : 1;
  __syncthreads();
  for (u32 i = thread / 4 * CLUSTER + rank; __any_sync(~0u, i < many); i += LANES / 4) {  // four threads look at a key
    const u64 key = i < many ? list[i] : ~0ull;
    u64 before = 0;
    for (u32 other = thread % 4; other < many; other += 4) before += list[other] > key ? weights[other] : 0;
    before += __shfl_xor_sync(~0u, before, 1);
    before += __shfl_xor_sync(~0u, before, 2) + above;
    if (i < many && thread % 4 == 0 && before < wanted && before + weights[i] >= wanted)
      for (u32 to = 0; to < CLUSTER; to++) send(&border, key, BORDER, to);
  }
  wait(barrier_of(BORDER), parity);
  __syncthreads();  // the bins may be used again
  return border;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) draw(const __grid_constant__ Arguments a) {
  const u32 rank = blockIdx.x % CLUSTER, thread = threadIdx.x, lane = thread % 32;
  const int row = blockIdx.x / CLUSTER;
  if (thread == 0) {
    leading = sortable(-infinity());
    for (int i = 0; i < BARRIERS; i++) init_barrier(barrier_of(i), 1);
    fence_barriers();
  }
  __syncthreads();
  cluster_here();
  launch_next();
  wait_kernel_before();
  EACH_ITEM {  // all in flight at once
    const float* from = a.logits + (long long)row * WIDTH + TOKEN(i);
    if (TOKEN(i) < WIDTH)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(&X(i))), "l"(from) : "memory");
    else
      X(i) = -infinity();
  }
  const float temperature = a.temperature[row], top_p = a.top_p[row], min_p = a.min_p[row];
  const long long top_k = a.top_k[row];
  const u32 seed = (u32)a.keys[2 * row], stream = (u32)a.keys[2 * row + 1];
  float most = -infinity();
  int most_at = 0;
  asm volatile("cp.async.wait_all;" ::: "memory");
  EACH_ITEM {
    if (X(i) != X(i)) X(i) = infinity();  // not a number: the row fails as one with an infinite logit
    if (X(i) > most) most = X(i), most_at = i;
  }
  auto random = [&](int i) { return mixed(mixed(TOKEN(i) * 0x9E3779B1u + seed) + stream); };
  auto noise = [&](int i) {
    const float u = fminf(__fadd_rn(__uint2float_rn(random(i)), 0.5f) * 0x1p-32f, 1 - 0x1p-24f);
    return -logf(-log1pf(-u));
  };
  const float floor = logf(min_p), noise_of_most = temperature > 0 ? noise(most_at) : 0;
  int turn = 0;
  cluster_wait();  // all blocks have started
  const float largest = sorted_value((u32)largest_of(exchange(warp_most(sortable(most)), turn, rank)));
  const bool failed = !(fabsf(largest) < infinity());
  u32 best = 0, winner = LAST_TOKEN;  // of this thread, made to sort
  if (failed || temperature <= 0) {
    EACH_ITEM
      if (X(i) == largest && TOKEN(i) < WIDTH) best = ~0u, winner = min(winner, TOKEN(i));
  } else {
    const Row in{largest, fminf(__fdiv_rn(1.f, temperature), 3e38f), rank};
    u64 lowest = 0;
    int borders = 0;
    if (top_k > 0 && top_k < WIDTH) lowest = border_of<false>(lowest, (double)top_k, in, turn, borders++);
    if (top_p < 1) lowest = border_of<true>(lowest, (double)top_p, in, turn, borders);
    const float sharpness = fminf(in.sharpness * LOG2_E, 3e38f);
    const float least = lowest ? sorted_value(lowest >> TOKEN_BITS) : -infinity();
    auto consider = [&](int i, float noise) {
      const float x = X(i), scaled = __fdiv_rn(x - largest, temperature);
      if (TOKEN(i) >= WIDTH || scaled < floor || key_of(sortable(x), TOKEN(i)) < lowest) return;
      const u32 sorts = sortable(__fadd_rn(scaled, noise));
      if (sorts > best || sorts == best && TOKEN(i) < winner) best = sorts, winner = TOKEN(i);
    };
    // Noise is at most -log(u): what cannot win even so is not looked at. The block's best so far starts with every thread's
    // largest logit. 0.01: for rounding.
    consider(most_at, noise_of_most);
    if (const u32 of_warp = warp_most(best); lane == 0) atomicMax(&leading, of_warp);
    __syncthreads();
    for (int i = 0; i < ITEMS; i += 4) {
      const float ceiling = (0.01f - sorted_value(*(volatile u32*)&leading)) * LOG2_E + 32;
      float bits[4];  // of which fewer would do, as a logarithm
      u32 may = 0;
#pragma unroll
      for (int j = 0; j < 4; j++) bits[j] = fmaf(X(i + j) - largest, sharpness, ceiling);
      if (fmaxf(fmaxf(bits[0], bits[1]), fmaxf(bits[2], bits[3])) < -1) continue;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(bits[j]));
        if (__uint2float_rn(random(i + j)) < bits[j] && X(i + j) >= least) may |= 1 << j;
      }
      if (!may) continue;
      for (; may; may &= may - 1) consider(i + __ffs(may) - 1, noise(i + __ffs(may) - 1));
      atomicMax(&leading, best);
    }
  }
  const u32 of_warp = warp_most(best);
  u32 token;
  asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(token) : "r"(best == of_warp ? winner : LAST_TOKEN));
  const u64* room = exchange(key_of(of_warp, token), turn, rank, true);
  if (rank == 0 && thread < 32) {
    const u64 drawn = largest_of(room);
    if (thread == 0) a.out[row] = failed ? -1 : (long long)(LAST_TOKEN - ((u32)drawn & LAST_TOKEN));
  }
}
