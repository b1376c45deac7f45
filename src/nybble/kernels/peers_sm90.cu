// All ranks' slices of rows side by side, on GPUs of one machine that read and write each other's memory. `sm90.cuh` goes first.
//
// A block has a run of 16-byte words of the slice, and on every GPU a mailbox per rank, in fact two of them by turns: a rank that
// writes the next but one has seen the next, so what it overwrites has been read. `gather` writes its words into the mailboxes on
// the others, says so there by a count, waits until the others have said so here, and puts all slices where they belong.
// `gather_few` sends the turn along with every four bytes instead, twice as much in half the time: a word per thread.
//
// Defined by the host: RANKS, MOST_BLOCKS, MOST_WORDS (of a block), THREADS; and those of sm90.cuh.

constexpr long long BOXES = 2 * RANKS * MOST_BLOCKS, FEW = BOXES * MOST_WORDS, COUNTS = FEW + BOXES * THREADS * 2;  // in words

struct Arguments {
  const uint4* x;
  uint4* out;
  uint4* room[RANKS];  // on each GPU, this one's too: mailboxes, those of `gather_few`, counts [RANKS][MOST_BLOCKS]
  u32* turn;           // [MOST_BLOCKS]
  const volatile int* lost;  // in the host's memory
  int rank, words, of_row, of_part, of_block;

  __device__ __forceinline__ uint4* place(int word, int from) const {  // in `out`
    const int row = word / of_row, column = word % of_row;
    return out + ((long long)row * of_row + column / of_part * of_part) * RANKS + from * of_part + column % of_part;
  }
  __device__ __forceinline__ long long box(u32 now, int from) const {
    return ((long long)(now & 1) * RANKS + from) * MOST_BLOCKS + blockIdx.x;
  }
  __device__ __forceinline__ bool given_up(int tries) const { return tries % 4096 == 0 && *lost; }
};

extern "C" __global__ void __launch_bounds__(THREADS) gather(const __grid_constant__ Arguments a) {
  const int first = blockIdx.x * a.of_block, count = min(a.words - first, a.of_block);
  wait_kernel_before();
  launch_next();
  const u32 now = a.turn[blockIdx.x] + 1;
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const uint4 word = a.x[first + i];
#pragma unroll
    for (int other = 1; other < RANKS; other++) a.room[(a.rank + other) % RANKS][a.box(now, a.rank) * MOST_WORDS + i] = word;
    *a.place(first + i, a.rank) = word;
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x < RANKS && threadIdx.x != a.rank) {
    u32* there = (u32*)(a.room[threadIdx.x] + COUNTS) + a.rank * MOST_BLOCKS + blockIdx.x;
    u32 heard, *here = (u32*)(a.room[a.rank] + COUNTS) + threadIdx.x * MOST_BLOCKS + blockIdx.x;
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(there), "r"(now) : "memory");
    for (int tries = 1;; tries++) {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(heard) : "l"(here) : "memory");
      if ((int)(heard - now) >= 0 || a.given_up(tries)) break;
    }
  }
  __syncthreads();
  for (int other = 1; other < RANKS; other++) {
    const int from = (a.rank + other) % RANKS;
    const uint4* mail = a.room[a.rank] + a.box(now, from) * MOST_WORDS;
    for (int i = threadIdx.x; i < count; i += THREADS) *a.place(first + i, from) = __ldcv(mail + i);
  }
  if (threadIdx.x == 0) a.turn[blockIdx.x] = now;
}

__device__ __forceinline__ void post(uint4* p, u32 a, u32 b, u32 now) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %2};" ::"l"(p), "r"(a), "r"(now), "r"(b) : "memory");
}
__device__ __forceinline__ uint4 read(const uint4* p) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

extern "C" __global__ void __launch_bounds__(THREADS) gather_few(const __grid_constant__ Arguments a) {
  const int first = blockIdx.x * a.of_block, count = min(a.words - first, a.of_block), i = threadIdx.x;
  wait_kernel_before();
  launch_next();
  const u32 now = a.turn[blockIdx.x] + 1;
  if (i < count) {
    const uint4 word = a.x[first + i];
#pragma unroll
    for (int other = 1; other < RANKS; other++) {
      uint4* mail = a.room[(a.rank + other) % RANKS] + FEW + (a.box(now, a.rank) * THREADS + i) * 2;
      post(mail, word.x, word.y, now), post(mail + 1, word.z, word.w, now);
    }
    *a.place(first + i, a.rank) = word;
#pragma unroll
    for (int other = 1; other < RANKS; other++) {
      const int from = (a.rank + other) % RANKS;
      const uint4* mail = a.room[a.rank] + FEW + (a.box(now, from) * THREADS + i) * 2;
      uint4 low, high;
      for (int tries = 1;; tries++) {
        low = read(mail), high = read(mail + 1);
        if ((low.y == now && low.w == now && high.y == now && high.w == now) || a.given_up(tries)) break;
      }
      *a.place(first + i, from) = {low.x, low.z, high.x, high.z};
    }
  }
  __syncthreads();
  if (i == 0) a.turn[blockIdx.x] = now;
}
