/* CPU kernels in one file: integer and float linear layers, row-wise ops, rotary embedding with the cache write, paged attention.
 *
 * Compiled on first use by cpu.py, which owns all checks of shapes and types; nothing here validates. The meaning of every
 * function is kernels/reference.py.
 *
 * The one idea: a number's arithmetic depends on that number alone. Each output element has one fixed order of operations,
 * written out in lanes of 16 floats, and tiling, threads and batch only decide when it is computed, never how. So a row gives
 * the same bits alone or in a batch, and a token the same bits as a prompt chunk or as a decode step. Compile with
 * -ffp-contract=off: where a multiply and an add are fused is our choice, not the optimizer's.
 */
#define _GNU_SOURCE /* sched_getcpu */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if !defined(NYBBLE_PORTABLE) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define AVX512 1
#elif !defined(NYBBLE_PORTABLE) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define AVX2 1
#elif !defined(NYBBLE_PORTABLE) && defined(__ARM_NEON) && defined(__aarch64__)
#define NEON 1
#endif
#if defined(AVX512) || defined(AVX2)
#include <immintrin.h>
#endif
#ifdef NEON
#include <arm_neon.h>
#endif

#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define ALWAYS static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
/* Weights are asked for ahead: the processor's own guesses start anew in each page and row, and products wait twice as long. */
enum { BYTES_AHEAD = 8192 };

/* ---- 16 lanes, in as many registers as the machine needs ---------------------------------------------------------------- */

enum { LANES = 16 };
#if defined(AVX512)
#define REGISTER 64
#elif defined(AVX2)
#define REGISTER 32
#else
#define REGISTER 16
#endif
enum { PIECES = 64 / REGISTER, WIDE = REGISTER / 4 };

typedef float vf __attribute__((vector_size(REGISTER)));
typedef int32_t vi __attribute__((vector_size(REGISTER)));
typedef uint32_t vu __attribute__((vector_size(REGISTER)));
typedef uint8_t vb __attribute__((vector_size(REGISTER)));
typedef float vf_any __attribute__((vector_size(REGISTER), aligned(1), may_alias));
typedef int32_t vi_any __attribute__((vector_size(REGISTER), aligned(1), may_alias));
typedef uint8_t vb_any __attribute__((vector_size(REGISTER), aligned(1), may_alias));
typedef struct { vf p[PIECES]; } F;
typedef struct { vi p[PIECES]; } I;
typedef struct { vb p[PIECES]; } B;

#define EACH UNROLL for (int i = 0; i < PIECES; i++)

ALWAYS F load(const float *x) { F r; EACH r.p[i] = *(const vf_any *)(x + i * WIDE); return r; }
ALWAYS void store(float *x, F a) { EACH *(vf_any *)(x + i * WIDE) = a.p[i]; }
ALWAYS B load_bytes(const uint8_t *x) { B r; EACH r.p[i] = *(const vb_any *)(x + i * REGISTER); return r; }
ALWAYS F splat(float x) { F r; EACH r.p[i] = x - (vf){0}; return r; } /* x - 0, not 0 + x: keeps -0.0 */
ALWAYS I splat_int(int32_t x) { I r; EACH r.p[i] = x - (vi){0}; return r; }
ALWAYS F add(F a, F b) { EACH a.p[i] += b.p[i]; return a; }
ALWAYS F sub(F a, F b) { EACH a.p[i] -= b.p[i]; return a; }
ALWAYS F mul(F a, F b) { EACH a.p[i] *= b.p[i]; return a; }
ALWAYS F divide(F a, F b) { EACH a.p[i] /= b.p[i]; return a; }
ALWAYS I add_int(I a, I b) { EACH a.p[i] += b.p[i]; return a; }
ALWAYS F to_float(I a) { F r; EACH r.p[i] = __builtin_convertvector(a.p[i], vf); return r; }
ALWAYS I bits(F a) { I r; EACH r.p[i] = (vi)a.p[i]; return r; }
ALWAYS F absolute(F a) { EACH a.p[i] = (vf)((vi)a.p[i] & 0x7fffffff); return a; }
ALWAYS I is_nan(F a) { I r; EACH r.p[i] = (vi)(a.p[i] != a.p[i]); return r; }
ALWAYS I or_int(I a, I b) { EACH a.p[i] |= b.p[i]; return a; }

/* a * b + c, rounded once where the machine can. */
ALWAYS F fma16(F a, F b, F c) {
#if defined(AVX512)
  EACH c.p[i] = (vf)_mm512_fmadd_ps((__m512)a.p[i], (__m512)b.p[i], (__m512)c.p[i]);
#elif defined(AVX2)
  EACH c.p[i] = (vf)_mm256_fmadd_ps((__m256)a.p[i], (__m256)b.p[i], (__m256)c.p[i]);
#elif defined(NEON)
  EACH c.p[i] = (vf)vfmaq_f32((float32x4_t)c.p[i], (float32x4_t)a.p[i], (float32x4_t)b.p[i]);
#else
  EACH c.p[i] += a.p[i] * b.p[i];
#endif
  return c;
}

/* a > b ? a : b; a NaN in b comes through, one in a does not. */
ALWAYS F maximum(F a, F b) {
#if defined(AVX512)
  EACH a.p[i] = (vf)_mm512_max_ps((__m512)a.p[i], (__m512)b.p[i]);
#else
  EACH { vi m = (vi)(a.p[i] > b.p[i]); a.p[i] = (vf)(((vi)a.p[i] & m) | ((vi)b.p[i] & ~m)); }
#endif
  return a;
}
ALWAYS F minimum(F a, F b) {
#if defined(AVX512)
  EACH a.p[i] = (vf)_mm512_min_ps((__m512)a.p[i], (__m512)b.p[i]);
#else
  EACH { vi m = (vi)(a.p[i] < b.p[i]); a.p[i] = (vf)(((vi)a.p[i] & m) | ((vi)b.p[i] & ~m)); }
#endif
  return a;
}

/* x where x > limit (or NaN), else `other`. */
ALWAYS F keep_above(F x, float limit, F when, float other) {
  EACH { vi low = (vi)(when.p[i] <= limit - (vf){0}); x.p[i] = (vf)(((vi)x.p[i] & ~low) | ((vi)(other - (vf){0}) & low)); }
  return x;
}

ALWAYS F load_part(const float *x, long count) {
#if defined(AVX512)
  F r; r.p[0] = (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), x);
  return r;
#else
  float t[LANES] = {0};
  memcpy(t, x, (size_t)count * 4);
  return load(t);
#endif
}
ALWAYS void store_part(float *x, F a, long count) {
#if defined(AVX512)
  _mm512_mask_storeu_ps(x, (__mmask16)((1u << count) - 1), (__m512)a.p[0]);
#else
  float t[LANES];
  store(t, a);
  memcpy(x, t, (size_t)count * 4);
#endif
}

/* The one order in which 16 lanes are added: halves, quarters, pairs. */
ALWAYS float sum16(F a) {
  float t[LANES];
#if defined(AVX512)
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256((__m512)a.p[0]), _mm512_extractf32x8_ps((__m512)a.p[0], 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  (void)t;
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
#else
  store(t, a);
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) t[i] += t[i + half];
  return t[0];
#endif
}
ALWAYS float max16(F a) {
#if defined(AVX512)
  return _mm512_reduce_max_ps((__m512)a.p[0]);
#else
  float t[LANES], m;
  store(t, a);
  m = t[0];
  for (int i = 1; i < LANES; i++) m = MAX(m, t[i]);
  return m;
#endif
}
ALWAYS int any(I a) {
#if defined(AVX512)
  return _mm512_test_epi32_mask((__m512i)a.p[0], (__m512i)a.p[0]) != 0;
#else
  int32_t t[LANES], r = 0;
  EACH *(vi_any *)(t + i * WIDE) = a.p[i];
  for (int i = 0; i < LANES; i++) r |= t[i];
  return r != 0;
#endif
}

/* e^x to about one unit in the last place for x in [-87, 88]; 0 below, e^88 above, NaN stays. Exactly 1 at 0. */
ALWAYS F exp16(F x) {
  const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to the nearest integer, ties to even */
  F big, n, r, y;
  EACH { vi high = (vi)(x.p[i] > 88.0f - (vf){0}); x.p[i] = (vf)(((vi)x.p[i] & ~high) | ((vi)(88.0f - (vf){0}) & high)); }
  big = fma16(x, splat(1.44269504f), splat(magic));
  n = sub(big, splat(magic));
  r = fma16(n, splat(-0.693359375f), x);
  r = fma16(n, splat(2.12194440e-4f), r);
  y = splat(1.3926927e-3f);
  y = fma16(y, r, splat(8.3637739e-3f));
  y = fma16(y, r, splat(4.16665501e-2f));
  y = fma16(y, r, splat(1.66665734e-1f));
  y = fma16(y, r, splat(0.5f));
  y = fma16(mul(y, r), r, add(r, splat(1.0f)));
  EACH y.p[i] = (vf)((vu)y.p[i] + (((vu)big.p[i] - 0x4b400000) << 23)); /* times 2^n through the exponent */
  return keep_above(y, -87.0f, x, 0.0f);
}

/* The low byte of 16 rounded lanes; |x| < 2^21. */
ALWAYS void store_rounded(uint8_t *out, F x, long count) {
  I b = bits(add(x, splat(12582912.0f)));
#if defined(AVX512)
  _mm512_mask_cvtepi32_storeu_epi8(out, (__mmask16)((1u << count) - 1), (__m512i)b.p[0]);
#else
  int32_t t[LANES];
  EACH *(vi_any *)(t + i * WIDE) = b.p[i];
  for (long i = 0; i < count; i++) out[i] = (uint8_t)t[i];
#endif
}

/* ---- 16-bit floats ------------------------------------------------------------------------------------------------------- */

enum { FP32, BF16, FP16, INT8, INT4 };

ALWAYS float as_float(uint32_t b) { float f; memcpy(&f, &b, 4); return f; }
ALWAYS uint32_t as_bits(float f) { uint32_t b; memcpy(&b, &f, 4); return b; }

ALWAYS float from_half(uint16_t h) {
#if defined(AVX512) || defined(AVX2)
  return _cvtsh_ss(h);
#endif
  uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
  if (magnitude >= 0x0f800000) return as_float(sign | 0x70000000 | magnitude); /* inf, NaN */
  return as_float(sign | as_bits(as_float(magnitude) * 0x1p112f));
}
static uint16_t to_half(float f) {
  uint32_t b = as_bits(f), sign = b >> 16 & 0x8000, m = b & 0x7fffffff;
  if (m > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (m >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* rounds to 65536 or more */
  if (m < 0x38800000)                                      /* subnormal: 0.5 has the half's last place as its own */
    return (uint16_t)(sign | (as_bits(as_float(m) + 0.5f) - 0x3f000000));
  return (uint16_t)(sign | ((m - 0x38000000 + 0xfff + (m >> 13 & 1)) >> 13));
}
ALWAYS uint16_t to_bf16(float f) {
  uint32_t b = as_bits(f);
  if ((b & 0x7fffffff) > 0x7f800000) return (uint16_t)(b >> 16 | 0x40);
  return (uint16_t)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

ALWAYS F load_as(const void *x, long at, int kind) {
  if (kind == FP32) return load((const float *)x + at);
  const uint16_t *h = (const uint16_t *)x + at;
  F r;
#if defined(AVX512)
  __m256i packed = _mm256_loadu_si256((const __m256i *)h);
  if (kind == FP16) r.p[0] = (vf)_mm512_cvtph_ps(packed);
  else r.p[0] = (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(packed), 16);
#elif defined(AVX2)
  EACH {
    __m128i packed = _mm_loadu_si128((const __m128i *)(h + i * WIDE));
    if (kind == FP16) r.p[i] = (vf)_mm256_cvtph_ps(packed);
    else r.p[i] = (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(packed), 16);
  }
#else
  EACH { /* as `from_half` does */
    typedef uint16_t vh __attribute__((vector_size(REGISTER / 2)));
    vh packed;
    memcpy(&packed, h + i * WIDE, sizeof packed);
    const vu wide = __builtin_convertvector(packed, vu), magnitude = (wide & 0x7fff) << 13;
    const vu special = (vu)(magnitude >= 0x0f800000), number = (vu)((vf)magnitude * 0x1p112f);
    if (kind == BF16) r.p[i] = (vf)(wide << 16);
    else r.p[i] = (vf)((wide & 0x8000) << 16 | (special & (magnitude | 0x70000000)) | (~special & number));
  }
#endif
  return r;
}
ALWAYS F load_part_as(const void *x, long at, int kind, long count) {
  if (kind == FP32) return load_part((const float *)x + at, count);
  uint16_t t[LANES] = {0};
  memcpy(t, (const uint16_t *)x + at, (size_t)count * 2);
  return load_as(t, 0, kind);
}
ALWAYS F load_codes(const uint8_t *x) {
#if defined(AVX512)
  F r; r.p[0] = (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)x)));
  return r;
#else
  float t[LANES];
  for (int i = 0; i < LANES; i++) t[i] = x[i];
  return load(t);
#endif
}

/* ---- threads and scratch ------------------------------------------------------------------------------------------------- */

/* Not OpenMP: its barrier waits for every thread of the team, so one that is not scheduled (another process has its core) stalls
 * each small call by a time slice, and a second runtime beside torch's would spin against it. Here tasks are handed out one by
 * one, the caller works too and at the end waits only for workers that did take part. A worker that is late finds the job shut. */
typedef struct { void (*body)(void *, long); void *data; long tasks; atomic_long next; } Job;
enum { MOST_WORKERS = 255, SPINS = 3000, OPEN = 1, JOINED = 2 };
static struct {
  pthread_mutex_t caller, bed; /* `caller` is held while a job runs */
  pthread_cond_t wake;
  atomic_uint jobs;     /* counts jobs: what an idle worker watches */
  atomic_int sleeping;  /* workers that stopped watching */
  atomic_int core;      /* where the caller last ran */
  atomic_uint state;    /* OPEN while workers may join, plus JOINED for each that is at work */
  Job *job;
  long workers;
  atomic_long wanted;
} pool = {.caller = PTHREAD_MUTEX_INITIALIZER, .bed = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

enum { CALL, WORK, SLOTS };
typedef struct { void *memory; size_t bytes; } Scratch;
static _Thread_local Scratch *scratch_of; /* [SLOTS] */
static pthread_key_t end_of_thread;
static void free_scratch(void *of) {
  for (int slot = 0; slot < SLOTS; slot++) free(((Scratch *)of)[slot].memory);
  free(of);
}
/* This thread's scratch memory, kept and grown until the thread ends. One caller per slot at a time. */
static void *scratch(int slot, size_t bytes) {
  if (!scratch_of) pthread_setspecific(end_of_thread, scratch_of = calloc(SLOTS, sizeof(Scratch)));
  if (scratch_of[slot].bytes < bytes) {
    free(scratch_of[slot].memory);
    bytes = (bytes + bytes / 4 + 4095) & ~(size_t)4095;
    if (posix_memalign(&scratch_of[slot].memory, 64, bytes)) {
      fprintf(stderr, "nybble: out of memory: a CPU kernel asked for %zu bytes of scratch\n", bytes);
      abort();
    }
    scratch_of[slot].bytes = bytes;
  }
  return scratch_of[slot].memory;
}

static int (*team_size)(void);
static long fixed_size = 1;
static void forget_workers(void) { /* a forked child has none */
  pthread_mutex_init(&pool.caller, NULL), pthread_mutex_init(&pool.bed, NULL), pthread_cond_init(&pool.wake, NULL);
  pool.workers = 0;
  atomic_store(&pool.sleeping, 0), atomic_store(&pool.state, 0);
}
/* How many threads to use: asked of `size` (torch's omp_get_max_threads) at each call, or `otherwise` when it is NULL. */
EXPORT void nybble_threads(void *size, int64_t otherwise) {
  team_size = (int (*)(void))size;
  fixed_size = otherwise;
  pthread_atfork(NULL, NULL, forget_workers);
  pthread_key_create(&end_of_thread, free_scratch);
}
static long threads(void) { return MIN(team_size ? team_size() : fixed_size, MOST_WORKERS + 1); }

ALWAYS void pause_core(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}
static void take_tasks(Job *job) {
  for (long task; (task = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed)) < job->tasks;) job->body(job->data, task);
}
/* On a busy machine the system may queue a worker behind the caller on one core, where it can only take the caller's time. */
static int this_core(void) {
#ifdef __linux__
  return sched_getcpu();
#else
  return -1;
#endif
}
static int beside_caller(void) {
  const int core = this_core();
  return core >= 0 && core == atomic_load_explicit(&pool.core, memory_order_relaxed);
}
static void *worker(void *number) {
  for (unsigned seen = 0;;) {
    for (int i = 1; i < SPINS && atomic_load_explicit(&pool.jobs, memory_order_acquire) == seen; i++)
      if (i % 64 == 0 && beside_caller()) sched_yield();
      else pause_core();
    if (atomic_load(&pool.jobs) == seen) {
      pthread_mutex_lock(&pool.bed);
      atomic_fetch_add(&pool.sleeping, 1);
      while (atomic_load(&pool.jobs) == seen) pthread_cond_wait(&pool.wake, &pool.bed);
      atomic_fetch_sub(&pool.sleeping, 1);
      pthread_mutex_unlock(&pool.bed);
    }
    seen = atomic_load(&pool.jobs);
    if ((long)(intptr_t)number >= atomic_load(&pool.wanted) || beside_caller()) continue;
    unsigned state = atomic_load(&pool.state);
    while (state & OPEN && !atomic_compare_exchange_weak(&pool.state, &state, state + JOINED)) {}
    if (!(state & OPEN)) continue;
    take_tasks(pool.job);
    atomic_fetch_sub(&pool.state, JOINED);
  }
  return NULL;
}
/* body(data, 0 .. tasks - 1) in any order; `work` is in units of about a nanosecond of one thread. */
static void parallel(void (*body)(void *, long), void *data, long tasks, double work) {
  Job job = {body, data, tasks, 0};
  const long wanted = tasks < 2 || work < 4000 ? 0 : MIN(threads(), tasks) - 1;
  if (wanted < 1 || pthread_mutex_trylock(&pool.caller)) { /* another thread of this process has the workers */
    take_tasks(&job);
    return;
  }
  while (pool.workers < wanted) {
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals belong to Python's main thread */
    const int failed = pthread_create(&thread, NULL, worker, (void *)(intptr_t)pool.workers);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) break;
    pthread_detach(thread);
    pool.workers++;
  }
  pool.job = &job;
  atomic_store_explicit(&pool.core, this_core(), memory_order_relaxed);
  atomic_store(&pool.wanted, wanted);
  atomic_store(&pool.state, OPEN);
  atomic_fetch_add(&pool.jobs, 1);
  if (atomic_load(&pool.sleeping)) {
    pthread_mutex_lock(&pool.bed);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.bed);
  }
  take_tasks(&job);
  atomic_fetch_and(&pool.state, ~(unsigned)OPEN);
  for (long i = 0; atomic_load_explicit(&pool.state, memory_order_acquire); i++) {
    if (i % 256 < 255) pause_core();
    else sched_yield(); /* and here a worker behind the caller */
  }
  pthread_mutex_unlock(&pool.caller);
}

/* ---- integer linear ------------------------------------------------------------------------------------------------------ */

/* Weights are stored unsigned (code + offset: 8 for int4, 128 for int8) because the dot instruction multiplies unsigned by
 * signed; the accumulator starts at -offset * sum(activations), so the int32 result is exact. A panel holds 32 output channels:
 * int8 as [K / 4][32][4] bytes, int4 as [K / 8][32][4] bytes whose low nibbles are k .. k + 3 and high nibbles k + 4 .. k + 7.
 * Padding is the byte 0, which adds nothing whatever it meets. */
typedef struct {
  const uint8_t *codes;
  const float *scale; /* [panel][group][32] */
  int64_t outputs, width, groups, four_bits; /* width: padded input channels per group, a multiple of 8 */
} Weight;

ALWAYS I dot4(I acc, B w, const int8_t *a, int four_bits) {
  int32_t quad;
  memcpy(&quad, a, 4);
  (void)four_bits;
#if defined(AVX512) && defined(__AVX512VNNI__)
  acc.p[0] = (vi)_mm512_dpbusd_epi32((__m512i)acc.p[0], (__m512i)w.p[0], _mm512_set1_epi32(quad));
#elif defined(AVX2) && defined(__AVXVNNI__)
  EACH acc.p[i] = (vi)_mm256_dpbusd_avx_epi32((__m256i)acc.p[i], (__m256i)w.p[i], _mm256_set1_epi32(quad));
#elif defined(AVX512) || defined(AVX2) || (defined(NEON) && defined(__ARM_FEATURE_DOTPROD))
  /* Products of a nibble fit 16 bits in pairs; a byte does not, so it goes in two nibbles. */
  EACH {
    vb low = w.p[i] & 15, high = w.p[i] >> 4;
#if defined(AVX512)
#define DOT(x) ((vi)_mm512_madd_epi16(_mm512_maddubs_epi16((__m512i)(x), _mm512_set1_epi32(quad)), _mm512_set1_epi16(1)))
#elif defined(AVX2)
#define DOT(x) ((vi)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)(x), _mm256_set1_epi32(quad)), _mm256_set1_epi16(1)))
#else
#define DOT(x) ((vi)vdotq_s32(vdupq_n_s32(0), (int8x16_t)(x), (int8x16_t)vdupq_n_s32(quad)))
#endif
    acc.p[i] += four_bits ? DOT(w.p[i]) : DOT(low) + (DOT(high) << 4);
  }
#else
  EACH {
    vi four = (vi)w.p[i];
    UNROLL for (int j = 0; j < 4; j++) acc.p[i] += (four >> (8 * j) & 255) * (int32_t)a[j];
  }
#endif
  return acc;
}

/* MR rows times one panel. `sums` [MR][groups]: sums of activations. Each group's int32 is turned to float and added in the
 * order of the groups; within a group the order is free because integers are exact. */
ALWAYS void linear_tile(const Weight *w, long panel, const int8_t *a, long lda, const int32_t *sums, const float *a_scale,
                        float *out, const int MR, const int four_bits) {
  const int CHAINS = MR <= 4 ? 2 : 1; /* enough independent accumulators to hide the latency of the dot */
  const long groups = w->groups, width = w->width, channels = MIN(32, w->outputs - panel * 32);
  const uint8_t *codes = w->codes + panel * groups * width * (four_bits ? 16 : 32);
  const float *scale = w->scale + panel * groups * 32;
  const int32_t offset = four_bits ? -8 : -128;
  F total[12][2];
  UNROLL for (int m = 0; m < MR; m++) total[m][0] = total[m][1] = splat(0);
  for (long g = 0; g < groups; g++) {
    I acc[12][2][2];
    UNROLL for (int m = 0; m < MR; m++) {
      acc[m][0][0] = acc[m][1][0] = splat_int(offset * sums[m * groups + g]);
      acc[m][0][1] = acc[m][1][1] = splat_int(0);
    }
    for (long k = 0; k < width; k += 8) {
      for (int line = 0; line < (four_bits ? 2 : 4); line++) __builtin_prefetch(codes + BYTES_AHEAD + line * 64);
      UNROLL for (int half = 0; half < 2; half++) {
        B w0, w1;
        if (four_bits) {
          w0 = load_bytes(codes), w1 = load_bytes(codes + 64);
          if (half) EACH { w0.p[i] >>= 4; w1.p[i] >>= 4; }
          else EACH { w0.p[i] &= 15; w1.p[i] &= 15; }
        } else
          w0 = load_bytes(codes + half * 128), w1 = load_bytes(codes + half * 128 + 64);
        UNROLL for (int m = 0; m < MR; m++) {
          const int8_t *quad = a + m * lda + g * width + k + half * 4;
          const int c = half * (CHAINS - 1);
          acc[m][0][c] = dot4(acc[m][0][c], w0, quad, four_bits);
          acc[m][1][c] = dot4(acc[m][1][c], w1, quad, four_bits);
        }
      }
      codes += four_bits ? 128 : 256;
    }
    UNROLL for (int m = 0; m < MR; m++) UNROLL for (int b = 0; b < 2; b++) {
      I exact = CHAINS == 2 ? add_int(acc[m][b][0], acc[m][b][1]) : acc[m][b][0];
      total[m][b] = fma16(to_float(exact), load(scale + g * 32 + b * LANES), total[m][b]);
    }
  }
  UNROLL for (int m = 0; m < MR; m++) {
    float *y = out + m * w->outputs + panel * 32;
    F y0 = mul(total[m][0], splat(a_scale[m])), y1 = mul(total[m][1], splat(a_scale[m]));
    if (channels == 32) store(y, y0), store(y + LANES, y1);
    else if (channels > LANES) store(y, y0), store_part(y + LANES, y1, channels - LANES);
    else if (channels == LANES) store(y, y0);
    else store_part(y, y0, channels);
  }
}

typedef struct { const Weight *w; const int8_t *a; int32_t *sums; const float *a_scale; float *out; long rows, chunk, chunks, panels; } Linear;

#define LINEAR_ROWS(MR)                                                                                                     \
  for (; last - m >= MR; m += MR) {                                                                                         \
    if (four_bits) linear_tile(w, panel, x->a + m * k, k, x->sums + m * w->groups, x->a_scale + m, x->out + m * w->outputs, MR, 1); \
    else linear_tile(w, panel, x->a + m * k, k, x->sums + m * w->groups, x->a_scale + m, x->out + m * w->outputs, MR, 0);   \
  }
static void linear_task(void *data, long task) {
  const Linear *x = data;
  const Weight *w = x->w;
  const long k = w->width * w->groups, first = task / x->chunks * x->panels, begin = task % x->chunks * x->chunk;
  const long last = MIN(x->rows, begin + x->chunk);
  const int four_bits = (int)w->four_bits;
  for (long panel = first, m = begin; panel < MIN(first + x->panels, (w->outputs + 31) / 32); panel++, m = begin) {
#ifdef AVX512
    LINEAR_ROWS(12)
    LINEAR_ROWS(8)
    LINEAR_ROWS(4)
#endif
    LINEAR_ROWS(3)
    LINEAR_ROWS(2)
    LINEAR_ROWS(1)
  }
}

static void sums_task(void *data, long task) {
  const Linear *x = data;
  const long groups = x->w->groups, width = x->w->width;
  for (long m = task * 16; m < MIN(x->rows, task * 16 + 16); m++)
    for (long g = 0; g < groups; g++) {
      const int8_t *a = x->a + m * groups * width + g * width;
      int32_t sum = 0;
      long i = 0;
#if defined(AVX512) && defined(__AVX512VNNI__)
      __m512i acc = _mm512_setzero_si512(), ones = _mm512_set1_epi8(1);
      for (; i + 64 <= width; i += 64) acc = _mm512_dpbusd_epi32(acc, ones, _mm512_loadu_si512(a + i));
      sum = _mm512_reduce_add_epi32(acc);
#endif
      for (; i < width; i++) sum += a[i];
      x->sums[m * groups + g] = sum;
    }
}

/* out[m, n] = a_scale[m] * sum over groups of scale[n, g] * exact int32. a int8 [rows, groups * width]. */
EXPORT void nybble_linear(const Weight *w, const int8_t *a, const float *a_scale, float *out, int64_t rows) {
  const long all = (w->outputs + 31) / 32, panels = rows > 3 ? 1 : MAX(1, all / (2 * threads())); /* in one stream */
  Linear x = {w, a, scratch(CALL, (size_t)(rows * w->groups) * 4), a_scale, out, rows, 240, (rows + 239) / 240, panels};
  const double macs = (double)rows * w->outputs * w->width * w->groups;
  parallel(sums_task, &x, (rows + 15) / 16, (double)rows * w->width * w->groups / 32);
  parallel(linear_task, &x, (all + panels - 1) / panels * x.chunks, macs / (rows > 3 ? 150 : 40));
}

/* ---- float linear, logits ------------------------------------------------------------------------------------------------ */

/* out[m, n] = sum over k of a[m, k] * w[n, k]: 16 lanes along k, in order, then one fixed tree. */
ALWAYS void dense_tile(const float *a, long lda, const void *w, long first, int kind, long k, float *out, long ldo, const int MR,
                       const int NR) {
  F acc[4][8];
  long i = 0;
  UNROLL for (int m = 0; m < MR; m++) UNROLL for (int n = 0; n < NR; n++) acc[m][n] = splat(0);
  for (; i + LANES <= k; i += LANES) {
    F row[8];
    UNROLL for (int n = 0; n < NR; n++) __builtin_prefetch((const char *)w + ((first + NR + n) * k + i) * (kind == FP32 ? 4 : 2));
    UNROLL for (int n = 0; n < NR; n++) row[n] = load_as(w, (first + n) * k + i, kind);
    UNROLL for (int m = 0; m < MR; m++) {
      F x = load(a + m * lda + i);
      UNROLL for (int n = 0; n < NR; n++) acc[m][n] = fma16(x, row[n], acc[m][n]);
    }
  }
  if (i < k) UNROLL for (int n = 0; n < NR; n++) {
    F row = load_part_as(w, (first + n) * k + i, kind, k - i);
    UNROLL for (int m = 0; m < MR; m++) acc[m][n] = fma16(load_part(a + m * lda + i, k - i), row, acc[m][n]);
  }
  UNROLL for (int m = 0; m < MR; m++) UNROLL for (int n = 0; n < NR; n++) out[m * ldo + n] = sum16(acc[m][n]);
}

typedef struct { const float *a; const void *w; float *out; long rows, outputs, k, kind, chunk, chunks; } Dense;
enum { DENSE_BLOCK = 48 };

#ifdef AVX512
#define DENSE_NR 6
#define DENSE_NR1 8
#else
#define DENSE_NR 3
#define DENSE_NR1 4
#endif
#define DENSE_TILE(MR, NR, ROWS, OUT, STRIDE)                                                                               \
  {                                                                                                                         \
    if (kind == FP32) dense_tile(ROWS, k, w, n, FP32, k, OUT, STRIDE, MR, NR);                                              \
    else if (kind == BF16) dense_tile(ROWS, k, w, n, BF16, k, OUT, STRIDE, MR, NR);                                         \
    else dense_tile(ROWS, k, w, n, FP16, k, OUT, STRIDE, MR, NR);                                                           \
  }
static void dense_task(void *data, long task) {
  const Dense *x = data;
  const long k = x->k, first = task / x->chunks * DENSE_BLOCK, last = MIN(x->outputs, first + DENSE_BLOCK);
  const long begin = task % x->chunks * x->chunk, end = MIN(x->rows, begin + x->chunk);
  const void *w = x->w;
  const int kind = (int)x->kind;
  long m = begin, n;
  if (end - begin >= 4) {
    /* A few output channels stay in the first cache while all rows pass. The block is written to `out` at the end: its rows lie
     * a multiple of a page apart where the vocabulary is a round number, and would evict each other half filled. */
    float *block = scratch(WORK, (size_t)(x->chunk * DENSE_BLOCK) * 4);
    const long whole = (end - begin) / 4 * 4;
    for (n = first; n < last;) {
      const long step = last - n >= DENSE_NR ? DENSE_NR : 1;
      for (m = begin; m < begin + whole; m += 4) {
        const float *rows = x->a + m * k;
        float *y = block + (m - begin) * DENSE_BLOCK + n - first;
        if (step == 1) DENSE_TILE(4, 1, rows, y, DENSE_BLOCK)
        else DENSE_TILE(4, DENSE_NR, rows, y, DENSE_BLOCK)
      }
      n += step;
    }
    for (m = 0; m < whole; m++)
      memcpy(x->out + (begin + m) * x->outputs + first, block + m * DENSE_BLOCK, (size_t)(last - first) * 4);
    m = begin + whole;
  }
  for (; m < end; m++) {
    const float *row = x->a + m * k;
    float *y = x->out + m * x->outputs;
    for (n = first; last - n >= DENSE_NR1; n += DENSE_NR1) DENSE_TILE(1, DENSE_NR1, row, y + n, 0)
    for (; n < last; n++) DENSE_TILE(1, 1, row, y + n, 0)
  }
}

/* a fp32 [rows, k] x w [outputs, k] of `kind` -> fp32 [rows, outputs]. */
EXPORT void nybble_dense(const float *a, const void *w, float *out, int64_t rows, int64_t outputs, int64_t k, int64_t kind) {
  Dense x = {a, w, out, rows, outputs, k, kind, 256, (rows + 255) / 256};
  parallel(dense_task, &x, (outputs + DENSE_BLOCK - 1) / DENSE_BLOCK * x.chunks, (double)rows * outputs * k / 16);
}

/* ---- rows ---------------------------------------------------------------------------------------------------------------- */

static float sum_squares(const float *x, long n) {
  F acc[4] = {splat(0), splat(0), splat(0), splat(0)};
  long i = 0;
  for (; i + 64 <= n; i += 64) UNROLL for (int j = 0; j < 4; j++) {
    F v = load(x + i + j * LANES);
    acc[j] = fma16(v, v, acc[j]);
  }
  for (; i < n; i += LANES) {
    F v = load_part(x + i, MIN(LANES, n - i));
    acc[0] = fma16(v, v, acc[0]);
  }
  return sum16(add(add(acc[0], acc[1]), add(acc[2], acc[3])));
}

/* x[i] = x[i] / rms(x) * weight[i] into y (which may be x). */
static void norm_row(const float *x, const float *weight, float *y, long n, float eps) {
  F inverse = splat(1.0f / sqrtf(sum_squares(x, n) / (float)n + eps));
  for (long i = 0; i < n; i += LANES) {
    const long part = MIN(LANES, n - i);
    store_part(y + i, mul(mul(load_part(x + i, part), inverse), load_part(weight + i, part)), part);
  }
}

static void quantize_row(const float *x, int8_t *codes, float *scale, long n) {
  F top = splat(0);
  I bad = splat_int(0);
  for (long i = 0; i < n; i += LANES) {
    F v = load_part(x + i, MIN(LANES, n - i));
    top = maximum(top, absolute(v));
    bad = or_int(bad, is_nan(v));
  }
  const float absmax = any(bad) ? NAN : MAX(max16(top), 1e-10f); /* a NaN must reach the output, not vanish in a code */
  const F inverse = splat(127.0f / absmax);
  for (long i = 0; i < n; i += LANES) {
    const long part = MIN(LANES, n - i);
    store_rounded((uint8_t *)codes + i, mul(load_part(x + i, part), inverse), part);
  }
  *scale = absmax / 127.0f;
}

typedef struct {
  const float *x, *residual, *weight;
  float *hidden, *out, *scale;
  int8_t *codes;
  long rows, n;
  float eps;
  long hadamard; /* values turned together, 0: none are */
} Rows;
enum { ROWS_PER_TASK = 8 };

static void quantize_task(void *data, long task) {
  const Rows *x = data;
  for (long m = task * ROWS_PER_TASK; m < MIN(x->rows, (task + 1) * ROWS_PER_TASK); m++)
    quantize_row(x->x + m * x->n, x->codes + m * x->n, x->scale + m, x->n);
}
EXPORT void nybble_quantize_rows(const float *x, int8_t *codes, float *scale, int64_t rows, int64_t n) {
  Rows data = {.x = x, .codes = codes, .scale = scale, .rows = rows, .n = n};
  parallel(quantize_task, &data, (rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK, (double)rows * n / 10);
}

static void norm_task(void *data, long task) {
  const Rows *x = data;
  const long n = x->n;
  float *row = x->codes ? scratch(WORK, (size_t)n * 4) : NULL;
  for (long m = task * ROWS_PER_TASK; m < MIN(x->rows, (task + 1) * ROWS_PER_TASK); m++) {
    const float *h = x->x + m * n;
    if (x->residual) {
      float *sum = x->hidden + m * n;
      const float *r = x->residual + m * n;
      for (long i = 0; i < n; i++) sum[i] = h[i] + r[i];
      h = sum;
    }
    norm_row(h, x->weight, x->codes ? row : x->out + m * n, n, x->eps);
    if (x->codes) quantize_row(row, x->codes + m * n, x->scale + m, n);
  }
}
/* hidden = x + residual (both or neither NULL); then fp32 `out`, or codes and scale when codes is not NULL. */
EXPORT void nybble_rms_norm(const float *x, const float *residual, float *hidden, const float *weight, float *out, int8_t *codes,
                            float *scale, int64_t rows, int64_t n, double eps) {
  Rows data = {x, residual, weight, hidden, out, scale, codes, rows, n, (float)eps};
  parallel(norm_task, &data, (rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK, (double)rows * n / 6);
}

/* Each run of `size` (a power of two) of n values times Sylvester's Hadamard matrix / sqrt(size), in place. */
static void hadamard(float *y, long n, long size) {
  for (long stride = 1; stride < size; stride *= 2)
    for (long start = 0; start < n; start += 2 * stride) {
      float *a = y + start, *b = a + stride;
      long i = 0;
      for (; i + LANES <= stride; i += LANES) {
        const F p = load(a + i), q = load(b + i);
        store(a + i, add(p, q)), store(b + i, sub(p, q));
      }
      for (; i < stride; i++) {
        const float p = a[i], q = b[i];
        a[i] = p + q, b[i] = p - q;
      }
    }
  const float scale = (float)(1.0 / sqrt((double)size));
  for (long i = 0; i < n; i++) y[i] *= scale;
}

static void silu_task(void *data, long task) {
  const Rows *x = data;
  const long n = x->n;
  float *row = x->codes ? scratch(WORK, (size_t)n * 4) : NULL;
  for (long m = task * ROWS_PER_TASK; m < MIN(x->rows, (task + 1) * ROWS_PER_TASK); m++) {
    const float *gate = x->x + m * 2 * n, *up = gate + n;
    float *y = x->codes ? row : x->out + m * n;
    for (long i = 0; i < n; i += LANES) {
      const long part = MIN(LANES, n - i);
      F g = load_part(gate + i, part), s = divide(g, add(splat(1.0f), exp16(sub(splat(0), g))));
      store_part(y + i, mul(s, load_part(up + i, part)), part);
    }
    if (x->hadamard) hadamard(y, n, x->hadamard);
    if (x->codes) quantize_row(row, x->codes + m * n, x->scale + m, n);
  }
}
EXPORT void nybble_silu_mul(const float *x, float *out, int8_t *codes, float *scale, int64_t rows, int64_t n, int64_t hadamard) {
  Rows data = {.x = x, .out = out, .codes = codes, .scale = scale, .rows = rows, .n = n, .hadamard = hadamard};
  parallel(silu_task, &data, (rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK, (double)rows * n / 3);
}

/* ---- the cache ----------------------------------------------------------------------------------------------------------- */

/* Block b, head h, token t, channel d at ((b * kv_heads + h) * block_size + t) * stored channels + d. */
typedef struct {
  void *k, *v;
  uint16_t *k_params, *v_params; /* half (scale, minimum) per vector of int8, per half of a vector of int4 */
  int64_t kind, kv_heads, block_size, dim;
} Cache;

/* Where the (scale, minimum) of half g of an int4 vector is: [block, head, half, token]. */
ALWAYS long half_at(const Cache *c, long vector, long g) {
  const long token = vector % c->block_size;
  return 2 * (vector - token) + g * c->block_size + token;
}

/* n values to codes of 0 .. levels over their own range. codes: n of them and room for a whole F. */
ALWAYS void encode_range(const float *x, long n, float levels, uint8_t *codes, uint16_t *pair) {
  F low = splat(x[0]), high = low;
  I bad = splat_int(0);
  long i = 0;
  for (; i + LANES <= n; i += LANES) {
    F v = load(x + i);
    low = minimum(low, v), high = maximum(high, v), bad = or_int(bad, is_nan(v));
  }
  float bottom = -max16(sub(splat(0), low)), top = max16(high);
  for (; i < n; i++) {
    bottom = MIN(bottom, x[i]), top = MAX(top, x[i]);
    if (x[i] != x[i]) bad = splat_int(1);
  }
  if (any(bad)) bottom = top = NAN;
  pair[0] = to_half((top - bottom) / levels), pair[1] = to_half(bottom);
  const float step = from_half(pair[0]);
  const F inverse = splat(step > 0 ? 1.0f / step : 0.0f), offset = splat(from_half(pair[1]));
  for (i = 0; i < n; i += LANES) {
    const long part = MIN(LANES, n - i);
    F t = mul(sub(load_part(x + i, part), offset), inverse);
    store_rounded(codes + i, minimum(maximum(t, splat(0)), splat(levels)), part);
  }
}

static void encode(const Cache *c, const float *x, int is_v, long vector) {
  const long dim = c->dim, half = dim / 2, quarter = dim / 4;
  void *at = is_v ? c->v : c->k;
  uint16_t *params = is_v ? c->v_params : c->k_params;
  if (c->kind == FP32) {
    memcpy((float *)at + vector * dim, x, (size_t)dim * 4);
  } else if (c->kind == BF16 || c->kind == FP16) {
    uint16_t *h = (uint16_t *)at + vector * dim;
    for (long i = 0; i < dim; i++) h[i] = c->kind == BF16 ? to_bf16(x[i]) : to_half(x[i]);
  } else if (c->kind == INT8) {
    encode_range(x, dim, 255, (uint8_t *)at + vector * dim, params + vector * 2);
  } else {
    uint8_t codes[half + LANES], *packed = (uint8_t *)at + vector * half;
    memset(codes, 0, sizeof codes);
    for (long g = 0; g < 2; g++, x += half) {
      uint16_t *pair = params + 2 * half_at(c, vector, g);
      encode_range(x, half, 15, codes, pair);
      const F step = splat(from_half(pair[0]));
      F error = splat(0); /* the minimum makes the errors sum to zero */
      for (long i = 0; i < half; i += LANES)
        error = add(error, sub(load_part(x + i, MIN(LANES, half - i)), mul(load_codes(codes + i), step)));
      pair[1] = to_half(sum16(error) / (float)half);
      for (long j = 0; j < quarter; j++) packed[2 * j + g] = (uint8_t)(codes[j] | codes[quarter + j] << 4);
    }
  }
}

/* One stored vector to `dim` floats. */
ALWAYS void decode(const Cache *c, const void *stored, const uint16_t *params, long vector, int kind, long dim, float *x) {
  long i = 0;
  if (kind == FP32) {
    memcpy(x, (const float *)stored + vector * dim, (size_t)dim * 4);
  } else if (kind == BF16 || kind == FP16) {
    for (; i + LANES <= dim; i += LANES) store(x + i, load_as(stored, vector * dim + i, kind));
    if (i < dim) store_part(x + i, load_part_as(stored, vector * dim + i, kind, dim - i), dim - i);
  } else if (kind == INT8) {
    const F scales = splat(from_half(params[vector * 2])), lows = splat(from_half(params[vector * 2 + 1]));
    const uint8_t *codes = (const uint8_t *)stored + vector * dim;
    for (; i + LANES <= dim; i += LANES) store(x + i, fma16(load_codes(codes + i), scales, lows));
    if (i < dim) {
      uint8_t t[LANES] = {0};
      memcpy(t, codes + i, (size_t)(dim - i));
      store_part(x + i, fma16(load_codes(t), scales, lows), dim - i);
    }
  } else {
    typedef uint16_t v16u __attribute__((vector_size(32)));
    typedef uint8_t v16b __attribute__((vector_size(16)));
    const long quarter = dim / 4;
    const uint8_t *codes = (const uint8_t *)stored + vector * (dim / 2);
    F scales[2], lows[2];
    UNROLL for (int g = 0; g < 2; g++) {
      const uint16_t *pair = params + 2 * half_at(c, vector, g);
      scales[g] = splat(from_half(pair[0])), lows[g] = splat(from_half(pair[1]));
    }
    for (; i < quarter; i += LANES) {
      const long part = MIN(LANES, quarter - i);
      v16u units = {0};
      if (part == LANES) memcpy(&units, codes + 2 * i, 2 * LANES);
      else memcpy(&units, codes + 2 * i, 2 * (size_t)part);
      UNROLL for (int n = 0; n < 4; n++) { /* quarter n of the channels */
        const v16b nibbles = __builtin_convertvector(units >> (4 * n) & 15, v16b);
        store_part(x + n * quarter + i, fma16(load_codes((const uint8_t *)&nibbles), scales[n / 2], lows[n / 2]), part);
      }
    }
  }
}

/* y = (x - shift) times a matrix [dim][dim]; no shift: NULL. */
static void turn_row(const float *x, const float *shift, const float *matrix, float *y, long dim) {
  for (long e = 0; e < dim; e += LANES) {
    const long part = MIN(LANES, dim - e);
    F sum = splat(0);
    for (long d = 0; d < dim; d++)
      sum = fma16(splat(shift ? x[d] - shift[d] : x[d]), load_part(matrix + d * dim + e, part), sum);
    store_part(y + e, sum, part);
  }
}

typedef struct {
  const float *qkv, *cos_sin, *q_norm, *k_norm, *q_turn, *k_turn, *shift, *v_turn; /* turns: [kv head][dim][dim], or NULL */
  float *q;
  Cache cache;
  const int32_t *positions;
  const int64_t *slots;
  long tokens, heads, rotary;
  float eps;
} Rope;

static void rope_task(void *data, long task) {
  const Rope *r = data;
  const Cache *c = &r->cache;
  const long dim = c->dim, half = r->rotary / 2, all = r->heads + 2 * c->kv_heads;
  for (long t = task * 4; t < MIN(r->tokens, task * 4 + 4); t++) {
    const float *cosine = r->cos_sin + r->positions[t] * r->rotary, *sine = cosine + half;
    const long slot = r->slots[t];
    for (long h = 0; h < all; h++) {
      const float *x = r->qkv + (t * all + h) * dim;
      const int is_q = h < r->heads, is_v = h >= r->heads + c->kv_heads;
      if (!is_q && slot < 0) break;
      float local[dim], spare[dim], *out = is_q ? r->q + (t * r->heads + h) * dim : local, *y = r->q_turn ? spare : out;
      const long head = h - r->heads - (is_v ? c->kv_heads : 0);
      const long vector = is_q ? 0 : (slot / c->block_size * c->kv_heads + head) * c->block_size + slot % c->block_size;
      if (is_v) {
        if (r->v_turn) turn_row(x, NULL, r->v_turn + head * dim * dim, spare, dim);
        encode(c, r->v_turn ? spare : x, 1, vector);
        continue;
      }
      const float *weight = is_q ? r->q_norm : r->k_norm;
      if (weight) norm_row(x, weight, local, dim, r->eps), x = local;
      for (long i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        y[i] = a * cosine[i] - b * sine[i];
        y[i + half] = b * cosine[i] + a * sine[i];
      }
      if (y != x) memcpy(y + 2 * half, x + 2 * half, (size_t)(dim - 2 * half) * 4);
      if (r->q_turn && is_q) turn_row(y, NULL, r->q_turn + h / (r->heads / c->kv_heads) * dim * dim, out, dim);
      else if (r->q_turn) turn_row(y, r->shift + head * dim, r->k_turn + head * dim * dim, out, dim);
      if (!is_q) encode(c, out, 0, vector);
    }
  }
}
EXPORT void nybble_rope_write(const float *qkv, float *q, const float *cos_sin, const float *q_norm, const float *k_norm,
                              const float *q_turn, const float *k_turn, const float *shift, const float *v_turn,
                              void *k, void *v, uint16_t *k_params, uint16_t *v_params, const int32_t *positions, const int64_t *slots,
                              int64_t kind, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t block_size, int64_t dim,
                              int64_t rotary, double eps) {
  Rope r = {qkv, cos_sin, q_norm, k_norm, q_turn, k_turn, shift, v_turn, q, {k, v, k_params, v_params, kind, kv_heads, block_size, dim},
            positions, slots, tokens, heads, rotary, (float)eps};
  parallel(rope_task, &r, (tokens + 3) / 4, (double)tokens * (heads + 2 * kv_heads) * dim / 3);
}

typedef struct { const float *x, *matrix; float *y; long heads, kv_heads, dim; } Heads;
static void turn_task(void *data, long token) {
  const Heads *t = data;
  for (long h = 0; h < t->heads; h++) {
    const long at = (token * t->heads + h) * t->dim;
    turn_row(t->x + at, NULL, t->matrix + h / (t->heads / t->kv_heads) * t->dim * t->dim, t->y + at, t->dim);
  }
}
/* y[token][head] = x[token][head] times the matrix of its KV head. */
EXPORT void nybble_turn_heads(const float *x, const float *matrix, float *y, int64_t tokens, int64_t heads, int64_t kv_heads,
                              int64_t dim) {
  Heads t = {x, matrix, y, heads, kv_heads, dim};
  parallel(turn_task, &t, tokens, (double)tokens * heads * dim * dim / 20);
}

/* ---- attention ----------------------------------------------------------------------------------------------------------- */

/* Keys come in tiles of 64 counted from position 0, tiles in segments of 4. A segment is an online softmax over its tiles that
 * starts afresh; segments are merged in order. That fixes the arithmetic of a (token, head) whoever computes it: a prompt block
 * runs all segments in turn, a lone decode row spreads them over threads, and both merge the same numbers. A key a token may not
 * see has weight exactly 0, so tiles shared with later tokens change nothing. Keys past the block's last token are never read:
 * their slots may hold anything. */
enum { TILE = 64, SEGMENT = 256, QUERY_ROWS = 192 };
static const float NOTHING = -1e30f; /* the running maximum before any key; finite, so differences are never NaN */

typedef struct {
  const float *q;
  float *out;
  Cache cache;
  const int32_t *table, *start, *context;
  long table_width, heads, window, padded, group;
  float scale;
  struct Piece *pieces;
  struct Share *shares;
} Attention;
/* Tokens [first, last) of one row and one KV head over segments [begin, end). */
struct Piece { int32_t row, head, first, last, begin, end, share; };
/* Segments of one block of tokens that several pieces compute: the one that finishes last merges. */
struct Share { atomic_int left; int32_t begin, end; float *partials; };

/* c[m] = (c[m] * keep[m], or 0) + sum over k, in order, of a[m][k] * b[k]. */
ALWAYS void product_tile(const float *a, long lda, const float *b, long ldb, float *c, long ldc, long k, const float *keep,
                         const int MR, const int NB) {
  F acc[6][4];
  UNROLL for (int m = 0; m < MR; m++) UNROLL for (int n = 0; n < NB; n++)
    acc[m][n] = keep ? mul(load(c + m * ldc + n * LANES), splat(keep[m])) : splat(0);
  for (long j = 0; j < k; j++) {
    F row[4];
    UNROLL for (int n = 0; n < NB; n++) row[n] = load(b + j * ldb + n * LANES);
    UNROLL for (int m = 0; m < MR; m++) {
      F x = splat(a[m * lda + j]);
      UNROLL for (int n = 0; n < NB; n++) acc[m][n] = fma16(x, row[n], acc[m][n]);
    }
  }
  UNROLL for (int m = 0; m < MR; m++) UNROLL for (int n = 0; n < NB; n++) store(c + m * ldc + n * LANES, acc[m][n]);
}
#define PRODUCT(MR, NB)                                                                                                     \
  for (; rows - m >= MR; m += MR)                                                                                           \
    product_tile(a + m * lda, lda, b + n, ldb, c + m * ldc + n, ldc, k, keep ? keep + m : NULL, MR, NB);
static void product(const float *a, long lda, const float *b, long ldb, float *c, long ldc, long rows, long columns, long k,
                    const float *keep) {
  for (long n = 0, m; n < columns;) {
#ifdef AVX512
    if (columns - n >= 64) { m = 0; PRODUCT(6, 4) PRODUCT(3, 4) PRODUCT(1, 4) n += 64; continue; }
#endif
    if (columns - n >= 32) { m = 0; PRODUCT(2, 2) PRODUCT(1, 2) n += 32; continue; }
    m = 0; PRODUCT(3, 1) PRODUCT(1, 1) n += 16;
  }
}

/* b[j][i] = a[i][j] for 16 x 16 floats. */
ALWAYS void transpose16(const float *a, long lda, float *b, long ldb) {
#ifdef AVX512
  __m512 r[16], t[16];
  UNROLL for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_ps(a + i * lda);
  UNROLL for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  UNROLL for (int i = 0; i < 4; i++) UNROLL for (int j = 0; j < 2; j++) {
    r[4 * i + 2 * j] = _mm512_shuffle_ps(t[4 * i + j], t[4 * i + 2 + j], 0x44);
    r[4 * i + 2 * j + 1] = _mm512_shuffle_ps(t[4 * i + j], t[4 * i + 2 + j], 0xee);
  }
  /* r[4 i + c] holds, in quarter q, column 4 q + c of rows 4 i .. 4 i + 3 */
  UNROLL for (int c = 0; c < 4; c++) {
    __m512 low02 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), low13 = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);
    __m512 high02 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88), high13 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
    _mm512_storeu_ps(b + c * ldb, _mm512_shuffle_f32x4(low02, high02, 0x88));
    _mm512_storeu_ps(b + (8 + c) * ldb, _mm512_shuffle_f32x4(low02, high02, 0xdd));
    _mm512_storeu_ps(b + (4 + c) * ldb, _mm512_shuffle_f32x4(low13, high13, 0x88));
    _mm512_storeu_ps(b + (12 + c) * ldb, _mm512_shuffle_f32x4(low13, high13, 0xdd));
  }
#else
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) b[j * ldb + i] = a[i * lda + j];
#endif
}

/* Keys [base, base + count) as columns `keys` [padded][64] and values as rows [64][padded]; the rest of the tile is zero. */
#define TILE_KINDS(KIND)                                                                                                    \
  for (long i = 0; i < count; i++, vector++, left--) {                                                                      \
    if (left == 0) vector = (*table++ * c->kv_heads + head) * c->block_size, left = c->block_size;                          \
    decode(c, c->k, c->k_params, vector, KIND, dim, rows + i * padded);                                                        \
    decode(c, c->v, c->v_params, vector, KIND, dim, values + i * padded);                                                      \
    for (long d = dim; d < padded; d++) rows[i * padded + d] = values[i * padded + d] = 0;                                  \
  }
static void read_tile(const Cache *c, const int32_t *table, long head, long base, long count, long padded, float *rows,
                      float *keys, float *values) {
  const long dim = c->dim, skipped = base % c->block_size;
  table += base / c->block_size;
  long vector = (*table++ * c->kv_heads + head) * c->block_size + skipped, left = c->block_size - skipped;
  switch (c->kind) {
  case FP32: TILE_KINDS(FP32) break;
  case BF16: TILE_KINDS(BF16) break;
  case FP16: TILE_KINDS(FP16) break;
  case INT8: TILE_KINDS(INT8) break;
  default: TILE_KINDS(INT4)
  }
  memset(rows + count * padded, 0, (size_t)((TILE - count) * padded) * 4);
  for (long i = 0; i < TILE; i += LANES)
    for (long d = 0; d < padded; d += LANES) transpose16(rows + i * padded + d, padded, keys + d * TILE + i, TILE);
}

/* Fold one segment's (maximum, sum, weighted values) into the running total. */
ALWAYS void merge(float *top, float *sum, float *total, float segment_top, float segment_sum, const float *values, long padded) {
  const float highest = MAX(*top, segment_top);
  float scale[LANES];
  F pair = splat(segment_top - highest);
  store(scale, exp16(splat(*top - highest)));
  const float old = scale[0];
  store(scale, exp16(pair));
  const float new = scale[0];
  *sum = *sum * old + segment_sum * new;
  for (long d = 0; d < padded; d += LANES)
    store(total + d, fma16(load(values + d), splat(new), mul(load(total + d), splat(old))));
  *top = highest;
}

static void write_out(const Attention *a, const struct Piece *p, const float *sum, const float *total) {
  const long dim = a->cache.dim, group = a->group;
  for (long t = p->first; t < p->last; t++)
    for (long h = 0; h < group; h++) {
      const long i = (t - p->first) * group + h;
      const F inverse = splat(1.0f / sum[i]);
      float *y = a->out + (t * a->heads + p->head * group + h) * dim;
      for (long d = 0; d < dim; d += LANES) {
        const long part = MIN(LANES, dim - d);
        store_part(y + d, mul(load_part(total + i * a->padded + d, part), inverse), part);
      }
    }
}

static void attention_task(void *data, long task) {
  const Attention *a = data;
  const struct Piece *p = a->pieces + task;
  const long padded = a->padded, dim = a->cache.dim, group = a->group, count = (p->last - p->first) * group;
  const long stride = padded + 2; /* of a partial: maximum, sum, values */
  float *rows = scratch(WORK, (size_t)(3 * TILE * padded + count * (3 * padded + TILE + 5)) * 4);
  float *keys = rows + TILE * padded, *values = keys + TILE * padded, *q = values + TILE * padded, *out = q + count * padded;
  float *total = out + count * padded, *scores = total + count * padded, *top = scores + count * TILE, *sum = top + count;
  float *keep = sum + count, *total_top = keep + count, *total_sum = total_top + count;
  const int32_t *table = a->table + p->row * a->table_width;
  /* position of token t: t + shift */
  const long shift = a->context[p->row] - a->start[p->row + 1];
  const long seen = p->last + shift; /* keys the last token sees */
  struct Share *share = p->share < 0 ? NULL : a->shares + p->share;

  for (long i = 0; i < count; i++) {
    const float *x = a->q + ((p->first + i / group) * a->heads + p->head * group + i % group) * dim;
    for (long d = 0; d < dim; d++) q[i * padded + d] = x[d] * a->scale;
    for (long d = dim; d < padded; d++) q[i * padded + d] = 0;
    total_top[i] = NOTHING, total_sum[i] = 0;
  }
  memset(total, 0, (size_t)(count * padded) * 4);

  for (long segment = p->begin; segment < p->end; segment++) {
    for (long i = 0; i < count; i++) top[i] = NOTHING, sum[i] = 0;
    memset(out, 0, (size_t)(count * padded) * 4);
    for (long base = segment * SEGMENT; base < MIN((segment + 1) * SEGMENT, seen); base += TILE) {
      if (a->window && base + TILE - 1 <= p->first + shift - a->window) continue; /* behind every token's window */
      const long valid = MIN(TILE, seen - base);
      const long from = MAX(0, base - (p->first + shift)) * group; /* earlier tokens see none of this tile */
      read_tile(&a->cache, table, p->head, base, valid, padded, rows, keys, values);
      product(q + from * padded, padded, keys, TILE, scores + from * TILE, TILE, count - from, TILE, padded, NULL);
      for (long i = from; i < count; i++) {
        float *s = scores + i * TILE;
        const long last = p->first + i / group + shift - base, first = a->window ? last - a->window + 1 : 0;
        F w[4], best, part;
        UNROLL for (int j = 0; j < 4; j++) w[j] = load(s + j * LANES);
        if (last < TILE - 1 || first > 0) {
          static const float lane[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
          UNROLL for (int j = 0; j < 4; j++) {
            F key = add(load(lane), splat((float)(j * LANES)));
            w[j] = keep_above(w[j], (float)first - 0.5f, key, -INFINITY);
            w[j] = keep_above(w[j], -(float)last - 0.5f, sub(splat(0), key), -INFINITY);
          }
        }
        best = maximum(maximum(w[0], w[1]), maximum(w[2], w[3]));
        const float high = max16(best), now = MAX(top[i], high);
        UNROLL for (int j = 0; j < 4; j++) store(s + j * LANES, w[j] = exp16(sub(w[j], splat(now))));
        part = add(add(w[0], w[1]), add(w[2], w[3]));
        if (now == top[i]) keep[i] = 1.0f;
        else {
          float t[LANES];
          store(t, exp16(splat(top[i] - now)));
          keep[i] = t[0];
        }
        sum[i] = sum[i] * keep[i] + sum16(part);
        top[i] = now;
      }
      product(scores + from * TILE, TILE, values, padded, out + from * padded, padded, count - from, padded, valid, keep + from);
    }
    if (share) {
      float *partial = share->partials + (segment - share->begin) * count * stride;
      for (long i = 0; i < count; i++) {
        partial[i * stride] = top[i], partial[i * stride + 1] = sum[i];
        memcpy(partial + i * stride + 2, out + i * padded, (size_t)padded * 4);
      }
    } else
      for (long i = 0; i < count; i++) merge(total_top + i, total_sum + i, total + i * padded, top[i], sum[i], out + i * padded, padded);
  }
  if (share) {
    if (atomic_fetch_sub_explicit(&share->left, 1, memory_order_acq_rel) > 1) return;
    for (long segment = share->begin; segment < share->end; segment++)
      for (long i = 0; i < count; i++) {
        const float *partial = share->partials + ((segment - share->begin) * count + i) * stride;
        merge(total_top + i, total_sum + i, total + i * padded, partial[0], partial[1], partial + 2, padded);
      }
  }
  write_out(a, p, total_sum, total);
}

/* q fp32 [T, heads, dim] -> out, same shape. Row r holds tokens [start[r], start[r + 1]), the last of which sees context[r]. */
EXPORT void nybble_attention(const float *q, float *out, void *k, void *v, uint16_t *k_params, uint16_t *v_params,
                             const int32_t *table, const int32_t *start, const int32_t *context, int64_t rows, int64_t table_width,
                             int64_t kind, int64_t heads, int64_t kv_heads, int64_t block_size, int64_t dim, int64_t window,
                             double scale) {
  Attention a = {q, out, {k, v, k_params, v_params, kind, kv_heads, block_size, dim}, table, start, context,
                 table_width, heads, window, (dim + LANES - 1) / LANES * LANES, heads / kv_heads, (float)scale, NULL, NULL};
  const long tokens = MAX(1, MIN(64, QUERY_ROWS / a.group));
  long blocks = 0, segments = 0;
  double work = 0;
  for (long r = 0; r < rows; r++) {
    const long count = start[r + 1] - start[r], here = (count + tokens - 1) / tokens;
    blocks += here * kv_heads;
    segments += here * kv_heads * (context[r] / SEGMENT + 1);
    work += (double)count * context[r] * heads * dim / 20;
  }
  const int split = blocks < 4 * threads() && threads() > 1 && work > 4000;
  const size_t pieces = (size_t)(split ? segments : blocks), partial = (size_t)(tokens * a.group * (a.padded + 2));
  char *memory = scratch(CALL, pieces * sizeof(struct Piece) + (split ? blocks * sizeof(struct Share) + 128 + pieces * partial * 4 : 0));
  a.pieces = (struct Piece *)memory;
  if (split) a.shares = (struct Share *)(((uintptr_t)(a.pieces + pieces) + 63) & ~(uintptr_t)63);
  float *partials = split ? (float *)(((uintptr_t)(a.shares + blocks) + 63) & ~(uintptr_t)63) : NULL;
  long next = 0, share = 0;
  for (long r = rows - 1; r >= 0; r--) /* the longest first: later tokens see more */
    for (long end = start[r + 1], first; end > start[r]; end = first) {
      first = start[r] + (end - start[r] - 1) / tokens * tokens;
      const long shift = context[r] - start[r + 1], oldest = a.window ? MAX(0, first + shift - a.window + 1) : 0;
      const long s0 = oldest / SEGMENT, s1 = (end - 1 + shift) / SEGMENT + 1;
      for (long h = 0; h < kv_heads; h++) {
        struct Piece piece = {(int32_t)r, (int32_t)h, (int32_t)first, (int32_t)end, (int32_t)s0, (int32_t)s1, -1};
        if (split && s1 - s0 > 1) {
          struct Share *s = a.shares + share;
          atomic_init(&s->left, (int)(s1 - s0));
          s->begin = (int32_t)s0, s->end = (int32_t)s1, s->partials = partials;
          partials += (s1 - s0) * (end - first) * a.group * (a.padded + 2);
          piece.share = (int32_t)share++;
          for (long i = s0; i < s1; i++) {
            piece.begin = (int32_t)i, piece.end = (int32_t)i + 1;
            a.pieces[next++] = piece;
          }
        } else
          a.pieces[next++] = piece;
      }
    }
  parallel(attention_task, &a, next, work);
}

EXPORT const char *nybble_instructions(void) {
#if defined(AVX512) && defined(__AVX512VNNI__)
  return "avx512 vnni";
#elif defined(AVX512)
  return "avx512";
#elif defined(AVX2) && defined(__AVXVNNI__)
  return "avx2 vnni";
#elif defined(AVX2)
  return "avx2";
#elif defined(NEON) && defined(__ARM_FEATURE_DOTPROD)
  return "neon dotprod";
#elif defined(NEON)
  return "neon";
#else
  return "portable";
#endif
}
