// A token's step on a CPU: threads go together through a list of operations, which are those of
// tachyscope/kernels (gemv, decode_attention, token_gate, decode_mlp, sample_code) for float32.
// Weights are float32, bfloat16, or int8 in the layout of kernels/gemv/weights.py.
//
// An operation is one phase or two, a phase some chunks that threads claim one by one. It is done
// when its chunks are, whoever did them: a thread that the system has put aside holds up nobody.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

using i64 = int64_t;
using i32 = int32_t;
typedef float v8 __attribute__((vector_size(32)));
typedef i32 n8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));

constexpr i64 BLOCK = 32;  // entries

enum Kind : i64 { F32 = 0, BF16 = 1, INT8 = 2 };
enum Code : i64 { GEMV = 0, ATTEND = 1, GATE = 2, MLP = 3, SAMPLE = 4, NORM = 5, ADD = 6 };
enum Rule : i64 { THRESHOLD = 0, SHARE = 1, DRAW = 2, BUDGET = 3 };
enum Limit : i64 { MAX_ROWS = 64 };

struct Weight {
  const void *data;
  const float *scale, *bias;
  i64 rows, columns, stride, kind;  // stride: stored numbers of a row
};

struct Norm {
  const float *weight, *bias;  // no weight: none; no bias: RMS
  double eps;
};

struct Gemv {
  float *out;
  const float *x;
  Norm norm;
  Weight weights[3];
  i64 count, batch, width, out_width, gelu, add;
};

struct Attend {
  float *out, *k, *v, *unrotated;
  const float *qkv, *log_count, *cos, *sin;
  const i32 *slot, *place, *padding;
  i64 batch, tokens, heads, kv_heads, dim, slots, log_heads, places, interleaved;
  i64 windowed, sink, near;
  // where a gate scores: the last frame's keys, and each head's part of the score
  i64 mixed;
  float *key, *scores;
};

struct Gate {  // kernels/token_gate; scores are sums over heads, or drawn, or changes of inputs x
  const float *scores, *luck, *x;
  Norm norm;
  i64 kv_heads, width;
  double size;  // what a sum is divided by
  i64 rule, strict, tied, age_limit, batch, places;
  double computed, replayed, most;
  const float *limit;
  const i32 *place, *ready, *age;
  i32 *skip, *counts;
  float *recent, *due, *credit, *input;
};

struct Mlp {
  float *x, *inner;
  Norm norm;
  Weight gate, up, down;
  i64 batch, width, linear, direct;  // direct: the linear rows are outputs as they are
  const i32 *place;
  i64 places;
  // what is kept
  i64 keeps;
  const i32 *ready;
  i32 *skip, *age;
  float *output, *drift, *input;
  double memory;
  // what the slice was off by
  const float *error, *base;
  float *fade;
  double beta;
};

struct Sample {
  const float *logits, *noise, *book;
  i64 *codes;
  float *total;
  const i32 *place;
  i64 rows, videos, count, places, depths, depth, dim, guided, top_k;
  double cfg, temperature, top_p;
};

struct Plain {  // NORM: out = norm(x); ADD: out += x
  float *out;
  const float *x;
  Norm norm;
  i64 batch, width;
};

struct Op {
  i64 code;
  void *body;
};

// cpu_library.py reads these structs, and the enums before them, from this text
#define SAME_SIZE(NAME) static_assert(sizeof(NAME) == SIZE_OF_##NAME, "cpu_library.py reads another " #NAME)
SAME_SIZE(Weight);
SAME_SIZE(Norm);
SAME_SIZE(Gemv);
SAME_SIZE(Attend);
SAME_SIZE(Gate);
SAME_SIZE(Mlp);
SAME_SIZE(Sample);
SAME_SIZE(Plain);
SAME_SIZE(Op);

inline v8 load(const float *p) {
  v8 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline void store(float *p, v8 x) { std::memcpy(p, &x, sizeof x); }

inline h8 load16(const void *p) {
  h8 x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline float sum(v8 x) {
  return ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]));
}

inline v8 floats(h8 bits) {
#ifdef __AVX2__  // the compiler makes eight numbers of it one by one
  n8 wide = (n8)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)bits), 16);
#else
  u8 wide = __builtin_convertvector(bits, u8) << 16;
#endif
  v8 x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

// four bytes a word, each less 128, as signed numbers
inline n8 codes(const i32 *p) {
  u8 words;
  std::memcpy(&words, p, sizeof words);
  words ^= 0x80808080u;
  n8 x;
  std::memcpy(&x, &words, sizeof x);
  return x;
}

inline v8 exp8(v8 x) {
  x = x < -87.0f ? v8{} - 87.0f : x;
  x = x > 88.0f ? v8{} + 88.0f : x;
  v8 half = x < 0.0f ? v8{} - 0.5f : v8{} + 0.5f;
  n8 n = __builtin_convertvector(x * 1.44269504088896341f + half, n8);
  v8 times = __builtin_convertvector(n, v8);
  v8 r = x - times * 0.693359375f - times * -2.12194440e-4f;
  v8 y = v8{} + 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  n8 bits = (n + 127) << 23;
  v8 power;
  std::memcpy(&power, &bits, sizeof power);
  return y * power;
}

inline v8 silu(v8 x) { return x / (1.0f + exp8(-x)); }

// x Φ(x), erf by Abramowitz and Stegun 7.1.26: off by 1.5e-7 at most
inline v8 gelu(v8 x) {
  v8 z = x * 0.70710678118654752f;
  v8 a = z < 0.0f ? -z : z;
  v8 t = 1.0f / (1.0f + 0.3275911f * a);
  v8 y = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t +
          0.254829592f) * t;
  v8 erf = 1.0f - y * exp8(-a * a);
  erf = z < 0.0f ? -erf : erf;
  return 0.5f * x * (1.0f + erf);
}

template <v8 (*F)(v8)>
void each(float *x, i64 count) {
  i64 i = 0;
  for (; i + 8 <= count; i += 8) store(x + i, F(load(x + i)));
  if (i < count) {
    float rest[8] = {};
    std::memcpy(rest, x + i, (count - i) * sizeof(float));
    store(rest, F(load(rest)));
    std::memcpy(x + i, rest, (count - i) * sizeof(float));
  }
}

float dot(const float *a, const float *b, i64 count) {
  v8 acc[2] = {};
  i64 i = 0;
  for (; i + 16 <= count; i += 16) {
    acc[0] += load(a + i) * load(b + i);
    acc[1] += load(a + i + 8) * load(b + i + 8);
  }
  float rest = 0;
  for (; i < count; i++) rest += a[i] * b[i];
  return sum(acc[0] + acc[1]) + rest;
}

// the eight sums of eight vectors
inline v8 sums(const v8 *x) {
  v8 y[4], z[2];
  for (int i = 0; i < 4; i++)
    y[i] = __builtin_shuffle(x[2 * i], x[2 * i + 1], n8{0, 8, 2, 10, 4, 12, 6, 14}) +
           __builtin_shuffle(x[2 * i], x[2 * i + 1], n8{1, 9, 3, 11, 5, 13, 7, 15});
  for (int i = 0; i < 2; i++)
    z[i] = __builtin_shuffle(y[2 * i], y[2 * i + 1], n8{0, 1, 8, 9, 4, 5, 12, 13}) +
           __builtin_shuffle(y[2 * i], y[2 * i + 1], n8{2, 3, 10, 11, 6, 7, 14, 15});
  return __builtin_shuffle(z[0], z[1], n8{0, 1, 2, 3, 8, 9, 10, 11}) +
         __builtin_shuffle(z[0], z[1], n8{4, 5, 6, 7, 12, 13, 14, 15});
}

// out [count] = q times keys [count, d]
void dots(float *out, const float *q, const float *keys, i64 count, i64 d) {
  i64 s = 0;
  for (; s + 8 <= count && d % 8 == 0; s += 8, keys += 8 * d) {
    v8 acc[8] = {};
    for (i64 c = 0; c < d; c += 8) {
      v8 in = load(q + c);
      for (int j = 0; j < 8; j++) acc[j] += in * load(keys + j * d + c);
    }
    store(out + s, sums(acc));
  }
  for (; s < count; s++, keys += d) out[s] = dot(q, keys, d);
}

// out [d] += p [count] times values [count, d]
void mix(float *__restrict out, const float *p, const float *values, i64 count, i64 d) {
  i64 s = 0;
  for (; s + 4 <= count; s += 4, values += 4 * d)
    for (i64 c = 0; c < d; c++)
      out[c] += p[s] * values[c] + p[s + 1] * values[d + c] + p[s + 2] * values[2 * d + c] +
                p[s + 3] * values[3 * d + c];
  for (; s < count; s++, values += d)
    for (i64 c = 0; c < d; c++) out[c] += p[s] * values[c];
}

void softmax(float *x, i64 count) {
  v8 most = v8{} - INFINITY;
  i64 i = 0;
  for (; i + 8 <= count; i += 8) {
    v8 here = load(x + i);
    most = here > most ? here : most;
  }
  float top = x[0], total = 0;
  for (int j = 0; j < 8; j++) top = std::max(top, most[j]);
  for (; i < count; i++) top = std::max(top, x[i]);
  for (i = 0; i < count; i++) x[i] -= top;
  each<exp8>(x, count);
  for (i = 0; i < count; i++) total += x[i];
  for (i = 0; i < count; i++) x[i] /= total;
}

// R rows of a matrix times B inputs x [B, columns]
template <int R, int B>
void product(const Weight &w, i64 row, const float *x, float *out, i64 out_stride) {
  v8 acc[R][B] = {};
  float rest[R][B] = {};
  i64 count = w.columns, i = 0;
  if (w.kind == F32) {
    const float *p = static_cast<const float *>(w.data) + row * w.stride;
    for (; i + 8 <= count; i += 8) {
      v8 in[B];
      for (int b = 0; b < B; b++) in[b] = load(x + b * count + i);
      for (int r = 0; r < R; r++) {
        v8 weight = load(p + r * w.stride + i);
        for (int b = 0; b < B; b++) acc[r][b] += weight * in[b];
      }
    }
    for (; i < count; i++)
      for (int r = 0; r < R; r++)
        for (int b = 0; b < B; b++) rest[r][b] += p[r * w.stride + i] * x[b * count + i];
  } else if (w.kind == BF16) {
    const uint16_t *p = static_cast<const uint16_t *>(w.data) + row * w.stride;
    for (; i + 8 <= count; i += 8) {
      v8 in[B];
      for (int b = 0; b < B; b++) in[b] = load(x + b * count + i);
      for (int r = 0; r < R; r++) {
        v8 weight = floats(load16(p + r * w.stride + i));
        for (int b = 0; b < B; b++) acc[r][b] += weight * in[b];
      }
    }
    for (; i < count; i++)
      for (int r = 0; r < R; r++) {
        uint32_t bits = static_cast<uint32_t>(p[r * w.stride + i]) << 16;
        float weight;
        std::memcpy(&weight, &bits, sizeof weight);
        for (int b = 0; b < B; b++) rest[r][b] += weight * x[b * count + i];
      }
  } else {
    // a word holds the codes of four columns a quarter of a row apart, each 128 too large
    const i32 *p = static_cast<const i32 *>(w.data) + row * w.stride;
    i64 part = count / 4;
    for (; i + 8 <= part; i += 8) {
      v8 in[4][B];
      for (int c = 0; c < 4; c++)
        for (int b = 0; b < B; b++) in[c][b] = load(x + b * count + c * part + i);
      for (int r = 0; r < R; r++) {
        n8 words = codes(p + r * w.stride + i);
        for (int c = 0; c < 4; c++) {
          v8 weight = __builtin_convertvector((words << (24 - 8 * c)) >> 24, v8);
          for (int b = 0; b < B; b++) acc[r][b] += weight * in[c][b];
        }
      }
    }
    for (; i < part; i++)
      for (int r = 0; r < R; r++)
        for (int c = 0; c < 4; c++) {
          float weight = static_cast<float>(((p[r * w.stride + i] >> (8 * c)) & 255) - 128);
          for (int b = 0; b < B; b++) rest[r][b] += weight * x[b * count + c * part + i];
        }
  }
  for (int r = 0; r < R; r++)
    for (int b = 0; b < B; b++) {
      float y = sum(acc[r][b]) + rest[r][b];
      if (w.scale) y *= w.scale[row + r];
      if (w.bias) y += w.bias[row + r];
      out[b * out_stride + r] = y;
    }
}

template <int B>
void some_rows(const Weight &w, i64 from, i64 to, const float *x, float *out, i64 out_stride) {
  constexpr int R = B == 1 ? 8 : 4;
  i64 row = from;
  for (; row + R <= to; row += R) product<R, B>(w, row, x, out + row - from, out_stride);
  for (; row < to; row++) product<1, B>(w, row, x, out + row - from, out_stride);
}

// out [batch, to - from] = rows from .. to of w times x [batch, columns], by blocks of rows that
// stay near while all inputs meet them
void rows_times(const Weight &w, i64 from, i64 to, const float *x, i64 batch, float *out,
                i64 out_stride) {
  i64 size = batch > 2 ? 8 : std::max<i64>(1, to - from);
  for (i64 row = from; row < to; row += size) {
    i64 end = std::min(to, row + size), b = 0;
    float *y = out + row - from;
    for (; b + 3 <= batch; b += 3)
      some_rows<3>(w, row, end, x + b * w.columns, y + b * out_stride, out_stride);
    for (; b + 2 <= batch; b += 2)
      some_rows<2>(w, row, end, x + b * w.columns, y + b * out_stride, out_stride);
    if (b < batch) some_rows<1>(w, row, end, x + b * w.columns, y + b * out_stride, out_stride);
  }
}

void normed(float *out, const float *x, const Norm &norm, i64 batch, i64 width) {
  for (i64 b = 0; b < batch; b++, out += width, x += width) {
    if (!norm.weight) {
      std::memcpy(out, x, width * sizeof(float));
      continue;
    }
    double mean = 0, square = 0;
    if (norm.bias) {
      for (i64 i = 0; i < width; i++) mean += x[i];
      mean /= width;
    }
    float middle = static_cast<float>(mean);
    v8 acc = {};
    i64 i = 0;
    for (; i + 8 <= width; i += 8) {
      v8 far = load(x + i) - middle;
      acc += far * far;
    }
    for (; i < width; i++) square += (x[i] - middle) * (x[i] - middle);
    square += sum(acc);
    float by = static_cast<float>(1.0 / std::sqrt(square / width + norm.eps));
    for (i = 0; i < width; i++) {
      float y = (x[i] - middle) * by * norm.weight[i];
      out[i] = norm.bias ? y + norm.bias[i] : y;
    }
  }
}

struct alignas(64) Phase {
  std::atomic<uint64_t> next, done;  // the step's number above 32 bits, chunks below
};

struct Program {
  const Op *ops;
  i64 count;
  std::vector<Phase> phases;
};

struct Thread {  // one of those that go through a step, and its own memory
  Program *program = nullptr;
  uint64_t step = 0;
  i64 at = 0, threads = 1;
  std::vector<float> a, b, c;

  float *room(std::vector<float> &v, i64 size) {
    if (static_cast<i64>(v.size()) < size) v.resize(size);
    return v.data();
  }

  // rows of a chunk: some for every thread, but not fewer than are worth a claim
  i64 rows_of_chunk(i64 rows, i64 columns) const {
    if (threads == 1) return rows;
    i64 worth = std::max<i64>(1, 16384 / columns);
    return 8 * ((std::max(worth, rows / (4 * threads)) + 7) / 8);
  }

  // do a phase's chunks with the others; false: the step is over without this thread
  template <class F>
  bool phase(i64 chunks, F work) {
    Phase &p = program->phases[at++];
    constexpr uint64_t LOW = 0xffffffff;
    uint64_t now = p.next.load(std::memory_order_acquire);
    for (;;) {
      if (now >> 32 != step) return false;
      if (static_cast<i64>(now & LOW) >= chunks) break;
      if (!p.next.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) continue;
      work(static_cast<i64>(now & LOW));
      p.done.fetch_add(1, std::memory_order_release);
      now = p.next.load(std::memory_order_acquire);
    }
    for (i64 spins = 0;; spins++) {
      uint64_t done = p.done.load(std::memory_order_acquire);
      if (done >> 32 != step) return false;
      if (static_cast<i64>(done & LOW) >= chunks) return true;
      if (spins < 4096)
        pause();
      else
        std::this_thread::yield();
    }
  }

  static void pause() {
#ifdef __AVX2__
    _mm_pause();
#endif
  }
};

bool run(const Gemv &op, Thread &t) {
  i64 size = t.rows_of_chunk(op.out_width, op.width);
  float *x = nullptr;
  return t.phase((op.out_width + size - 1) / size, [&](i64 chunk) {
    if (!x) normed(x = t.room(t.a, op.batch * op.width), op.x, op.norm, op.batch, op.width);
    i64 from = chunk * size, to = std::min(op.out_width, from + size), stride = to - from;
    float *y = t.room(t.b, op.batch * stride);
    i64 offset = 0;
    for (i64 i = 0; i < op.count; i++) {
      const Weight &w = op.weights[i];
      i64 low = std::max(from, offset), high = std::min(to, offset + w.rows);
      if (low < high)
        rows_times(w, low - offset, high - offset, x, op.batch, y + low - from, stride);
      offset += w.rows;
    }
    if (op.gelu) each<gelu>(y, op.batch * stride);
    for (i64 b = 0; b < op.batch; b++)
      for (i64 n = from; n < to; n++) {
        float &out = op.out[b * op.out_width + n];
        out = op.add ? out + y[b * stride + n - from] : y[b * stride + n - from];
      }
  });
}

void turn(float *out, const float *x, const float *cos, const float *sin, i64 dim, i64 pairs) {
  for (i64 i = 0; i < dim; i++) {
    i64 partner = pairs ? i ^ 1 : (i + dim / 2) % dim;
    out[i] = x[i] * cos[i] + x[partner] * sin[i];
  }
}

// a number that no sum is fused with: products round as they do elsewhere
inline float rounded(float x) {
  volatile float y = x;
  return y;
}

// relative changes of inputs a from those that made the kept outputs, negative
void score_inputs(const Gate &op, const float *a, float *score) {
  for (i64 b = 0; b < op.batch; b++) {
    const float *base = op.input + (b * op.places + *op.place) * op.width, *now = a + b * op.width;
    float far = 0, size = 0;
    for (i64 i = 0; i < op.width; i++) {
      far += (now[i] - base[i]) * (now[i] - base[i]);
      size += base[i] * base[i];
    }
    score[b] = -std::sqrt(far) / std::max(std::sqrt(size), 1e-12f);
  }
}

void score_heads(const Gate &op, float *score) {
  for (i64 b = 0; b < op.batch; b++) {
    for (i64 h = 0; h < op.kv_heads; h++) score[b] += op.scores[b * op.kv_heads + h];
    score[b] /= static_cast<float>(op.size);
  }
}

bool replays(const Gate &op, i64 b, float score) {
  i64 place = *op.place;
  float limit = *op.limit;
  bool young = !op.age_limit || op.age[b * op.places + place] < op.age_limit;
  if (op.rule == THRESHOLD) return young && (op.strict ? score > limit : score >= limit);
  if (op.rule == DRAW) return young && score < limit;
  if (op.rule == SHARE) {
    float *ring = op.recent + b * op.places;
    i64 known = 0, higher = 0;
    for (i64 i = 0; i < op.places; i++) {
      known += ring[i] == ring[i];
      higher += ring[i] > score;
    }
    ring[place] = score;
    bool replay = young && higher + 0.5f < op.due[b] * (known + 1);
    op.due[b] += static_cast<float>(replay ? op.replayed : op.computed);
    return replay;
  }
  float price = rounded(score * score), left = std::min(op.credit[b] + limit, limit * op.places);
  bool replay = young && price <= left && price <= static_cast<float>(op.most) * limit;
  op.credit[b] = replay ? left - price : left;
  return replay;
}

bool run(const Gate &op, Thread &t) {
  return t.phase(1, [&](i64) {
    i64 n = op.batch, replayed = 0;
    float score[MAX_ROWS] = {}, *a = nullptr;
    if (op.x) {
      normed(a = t.room(t.a, n * op.width), op.x, op.norm, n, op.width);
      score_inputs(op, a, score);
    } else if (op.luck) {
      std::copy_n(op.luck + *op.place * n, n, score);
    } else {
      score_heads(op, score);
    }
    for (i64 b = 0; op.tied && b < n / 2; b++)
      score[b] = score[b + n / 2] = (score[b] + score[b + n / 2]) / 2;
    for (i64 b = 0; b < n; b++) {
      op.skip[b] = *op.ready && replays(op, b, score[b]);
      replayed += op.skip[b];
      if (a && !op.skip[b])
        std::copy_n(a + b * op.width, op.width, op.input + (b * op.places + *op.place) * op.width);
    }
    op.counts[replayed == n ? 0 : 1] += static_cast<i32>(replayed);
  });
}

// one token's query of a head's group, which reads what is written up to its slot
void attend(const Attend &op, Thread &t, i64 task, i64 token) {
  i64 d = op.dim, group = op.heads / op.kv_heads, slot = *op.slot + token;
  i64 b = task / op.kv_heads, h = task % op.kv_heads, row = b * op.tokens + token;
  i64 wide = (op.heads + 2 * op.kv_heads) * d, place = *op.place + token;
  float by = 1 / std::sqrt(static_cast<float>(d));
  float *p = t.room(t.a, group * (slot + 1)), *q = t.room(t.b, group * d);
  const float *raw = op.qkv + row * wide + h * group * d;
  float *k = op.k + task * op.slots * d, *v = op.v + task * op.slots * d;
  for (i64 g = 0; g < group; g++)
    if (op.cos) {
      i64 at = (b * op.places + place) * d;
      turn(q + g * d, raw + g * d, op.cos + at, op.sin + at, d, op.interleaved);
    } else {
      std::memcpy(q + g * d, raw + g * d, d * sizeof(float));
    }
  if (op.key) {
    float *last = op.key + (task * op.places + place) * d, score = 0;
    for (i64 g = 0; g < group; g++) score += dot((op.mixed ? raw : q) + g * d, last, d);
    op.scores[task] = score;
    std::memcpy(last, k + slot * d, d * sizeof(float));
  }
  // entries that are read: all, or the sink and the newest
  i64 ranges[2][2] = {{0, slot + 1}, {0, 0}};
  if (op.windowed && slot + 1 > op.padding[b] + op.sink + op.near) {
    i64 first = op.padding[b], near = std::max<i64>(0, slot + 1 - op.near);
    ranges[0][0] = first;
    ranges[0][1] = std::min(first + op.sink, near);
    ranges[1][0] = near;
    ranges[1][1] = slot + 1;
  }
  const float *logs = nullptr;
  if (op.log_count)
    logs = op.log_count + (b * op.log_heads + (op.log_heads > 1 ? h : 0)) * op.slots;
  // by blocks of entries, which all heads of a group read while they are near
  i64 count = 0, stride = slot + 1;
  for (auto &range : ranges)
    for (i64 s = range[0]; s < range[1]; s += BLOCK) {
      i64 many = std::min(BLOCK, range[1] - s);
      for (i64 g = 0; g < group; g++) {
        float *w = p + g * stride + count;
        dots(w, q + g * d, k + s * d, many, d);
        for (i64 i = 0; i < many; i++) w[i] *= by;
        // the present tokens' own entries stand for themselves
        for (i64 i = 0; logs && i < many; i++)
          if (s + i < *op.slot) w[i] += std::max(logs[s + i], -1e30f);
      }
      count += many;
    }
  float *out = op.out + (row * op.heads + h * group) * d;
  std::fill(out, out + group * d, 0.0f);
  for (i64 g = 0; g < group; g++) softmax(p + g * stride, count);
  count = 0;
  for (auto &range : ranges)
    for (i64 s = range[0]; s < range[1]; s += BLOCK) {
      i64 many = std::min(BLOCK, range[1] - s);
      for (i64 g = 0; g < group; g++) mix(out + g * d, p + g * stride + count, v + s * d, many, d);
      count += many;
    }
}

// keys and values of a head's tokens, put into their slots
void write(const Attend &op, i64 task, i64 token) {
  i64 d = op.dim, b = task / op.kv_heads, h = task % op.kv_heads;
  const float *row = op.qkv + (b * op.tokens + token) * (op.heads + 2 * op.kv_heads) * d;
  const float *key = row + (op.heads + h) * d, *value = key + op.kv_heads * d;
  i64 at = (task * op.slots + *op.slot + token) * d;
  if (op.cos) {
    i64 angle = (b * op.places + *op.place + token) * d;
    turn(op.k + at, key, op.cos + angle, op.sin + angle, d, op.interleaved);
  } else {
    std::memcpy(op.k + at, key, d * sizeof(float));
  }
  std::memcpy(op.v + at, value, d * sizeof(float));
  if (op.unrotated) std::memcpy(op.unrotated + at, key, d * sizeof(float));
}

bool run(const Attend &op, Thread &t) {
  return t.phase(op.batch * op.kv_heads, [&](i64 task) {
    for (i64 token = 0; token < op.tokens; token++) write(op, task, token);
    for (i64 token = 0; token < op.tokens; token++) attend(op, t, task, token);
  });
}

// x += what was kept, for all rows: no weight is read
void replay(const Mlp &op, i64 place) {
  for (i64 b = 0; b < op.batch; b++) {
    float *kept = op.output + (b * op.places + place) * op.width, *x = op.x + b * op.width;
    for (i64 i = 0; i < op.width; i++) {
      if (op.drift) kept[i] += op.drift[b * op.width + i];
      x[i] += kept[i];
    }
    op.age[b * op.places + place]++;
  }
}

// how far a remembered error still holds at inputs a
void fade(const Mlp &op, const float *a, i64 place) {
  for (i64 b = 0; b < op.batch; b++) {
    const float *base = op.base + (b * op.places + place) * op.width, *now = a + b * op.width;
    float far = 0, size = 0;
    for (i64 i = 0; i < op.width; i++) {
      far += (now[i] - base[i]) * (now[i] - base[i]);
      size += base[i] * base[i];
    }
    op.fade[b] = std::exp(-static_cast<float>(op.beta) * far / std::max(size, 1e-12f));
  }
}

bool run(const Mlp &op, Thread &t) {
  i64 w = op.width, n = op.batch, place = op.place ? *op.place : 0;
  bool all = op.keeps;
  for (i64 b = 0; b < n && all; b++) all = op.skip[b] != 0;
  if (all) {
    bool done = t.phase(1, [&](i64) { replay(op, place); });
    t.at++;
    return done;
  }
  i64 inner = op.up.rows, columns = op.down.columns;  // less where linear rows are outputs
  i64 size = t.rows_of_chunk(inner, 2 * w);
  float *a = nullptr;
  bool done = t.phase((inner + size - 1) / size, [&](i64 chunk) {
    if (!a) normed(a = t.room(t.a, n * w), op.x, op.norm, n, w);
    i64 from = chunk * size, to = std::min(inner, from + size), stride = to - from;
    i64 active = std::min(to, inner - op.linear) - from;
    float *up = t.room(t.b, n * stride);
    rows_times(op.up, from, to, a, n, up, stride);
    if (active > 0 && op.gate.data) {
      float *gate = t.room(t.c, n * active);
      rows_times(op.gate, from, from + active, a, n, gate, active);
      each<silu>(gate, n * active);
      for (i64 b = 0; b < n; b++)
        for (i64 i = 0; i < active; i++) up[b * stride + i] *= gate[b * active + i];
    } else if (active > 0) {
      for (i64 b = 0; b < n; b++) each<gelu>(up + b * stride, active);
    }
    for (i64 b = 0; b < n; b++)
      for (i64 i = from; i < to; i++) {
        i64 at = i < columns ? b * columns + i : n * columns + b * w + i - columns;
        op.inner[at] = up[b * stride + i - from];
      }
    if (chunk == 0 && op.error) fade(op, a, place);
    for (i64 b = 0; chunk == 0 && op.input && b < n; b++)
      if (!op.skip[b])
        std::memcpy(op.input + (b * op.places + place) * w, a + b * w, w * sizeof(float));
  });
  if (!done) return false;
  size = t.rows_of_chunk(w, columns);
  return t.phase((w + size - 1) / size, [&](i64 chunk) {
    i64 from = chunk * size, to = std::min(w, from + size), stride = to - from;
    float *y = t.room(t.b, n * stride);
    rows_times(op.down, from, to, op.inner, n, y, stride);
    for (i64 b = 0; b < n; b++) {
      float *x = op.x + b * w, *row = y + b * stride;
      i64 at = (b * op.places + place) * w;
      for (i64 i = from; op.direct && i < to; i++) row[i - from] += op.inner[n * columns + b * w + i];
      for (i64 i = from; op.error && i < to; i++) row[i - from] += op.fade[b] * op.error[at + i];
      for (i64 i = from; op.keeps && i < to; i++) {
        float *drift = op.drift ? op.drift + b * w + i : nullptr, &kept = op.output[at + i];
        if (op.skip[b])
          row[i - from] = kept + (drift ? *drift : 0.0f);
        else if (drift && *op.ready)
          *drift += (row[i - from] - kept - *drift) / static_cast<float>(op.memory);
        kept = row[i - from];
      }
      for (i64 i = from; i < to; i++) x[i] += row[i - from];
      if (op.keeps && chunk == 0) {
        i32 &age = op.age[b * op.places + place];
        age = op.skip[b] ? age + 1 : 0;
      }
    }
  });
}

bool run(const Sample &op, Thread &t) {
  i64 count = op.count, place = *op.place;
  return t.phase(op.videos, [&](i64 v) {
    float *logits = t.room(t.a, count), *score = t.room(t.b, count);
    float *mass = t.room(t.c, count);
    const float *with = op.logits + v * count, *without = with + op.videos * count;
    const float *noise = op.noise + ((v * op.places + place) * op.depths + op.depth) * count;
    float cfg = static_cast<float>(op.cfg), heat = static_cast<float>(op.temperature);
    float most = -INFINITY;
    for (i64 i = 0; i < count; i++) {
      float x = op.guided ? without[i] + cfg * (with[i] - without[i]) : with[i];
      logits[i] = x / heat;
      most = std::max(most, logits[i]);
      score[i] = logits[i] - std::log(noise[i]);
    }
    float least = -INFINITY, total = 0;  // of the top k
    if (op.top_k < count) {
      std::copy(logits, logits + count, mass);
      std::nth_element(mass, mass + op.top_k - 1, mass + count, std::greater<float>());
      least = mass[op.top_k - 1];
    }
    for (i64 i = 0; i < count; i++) mass[i] = logits[i] - most;
    each<exp8>(mass, count);
    for (i64 i = 0; i < count; i++) total += logits[i] >= least ? mass[i] : 0.0f;
    i64 code = 0;
    for (;;) {  // the best by score, unless it is ruled out
      code = std::max_element(score, score + count) - score;
      if (logits[code] == most) break;
      float before = 0;
      for (i64 i = 0; i < count; i++) before += logits[i] > logits[code] ? mass[i] : 0.0f;
      bool late = op.top_p < 1 && before / total >= static_cast<float>(op.top_p);
      if (logits[code] >= least && !late) break;
      score[code] = -INFINITY;
    }
    op.codes[(v * op.places + place) * op.depths + op.depth] = code;
    for (i64 b = v; b < op.rows; b += op.videos)
      for (i64 i = 0; i < op.dim; i++) {
        float &sum = op.total[b * op.dim + i], entry = op.book[code * op.dim + i];
        sum = op.depth ? sum + entry : entry;
      }
  });
}

bool run(const Plain &op, Thread &t, bool norm) {
  return t.phase(1, [&](i64) {
    if (norm)
      normed(op.out, op.x, op.norm, op.batch, op.width);
    else
      for (i64 i = 0; i < op.batch * op.width; i++) op.out[i] += op.x[i];
  });
}

i64 phases_of(const Op &op) { return op.code == MLP ? 2 : 1; }

void go_through(Program *program, uint64_t step, i64 threads, Thread &t) {
  t.program = program;
  t.step = step;
  t.threads = threads;
  t.at = 0;
  bool on = true;
  for (i64 i = 0; i < program->count && on; i++) {
    const void *body = program->ops[i].body;
    switch (program->ops[i].code) {
      case GEMV: on = run(*static_cast<const Gemv *>(body), t); break;
      case ATTEND: on = run(*static_cast<const Attend *>(body), t); break;
      case GATE: on = run(*static_cast<const Gate *>(body), t); break;
      case MLP: on = run(*static_cast<const Mlp *>(body), t); break;
      case SAMPLE: on = run(*static_cast<const Sample *>(body), t); break;
      default: on = run(*static_cast<const Plain *>(body), t, program->ops[i].code == NORM);
    }
  }
}

// Threads that help; they live as long as the process, and sleep while there is nothing to do.
struct Pool {
  std::mutex one;  // step at a time
  std::mutex lock;
  std::condition_variable wake;
  std::atomic<uint64_t> step{0};  // odd while one runs
  std::atomic<Program *> program{nullptr};
  std::atomic<i64> threads{1}, sleepers{0};
  std::vector<std::atomic<int> *> inside;  // whether a helper is in a step
  Thread own;

  void help(i64 index, std::atomic<int> *here) {
    Thread thread;
    uint64_t seen = 0;
    for (;;) {
      for (i64 spins = 0; step.load() == seen || step.load() % 2 == 0; spins++) {
        if (spins < 8192) {
          Thread::pause();
          continue;
        }
        std::unique_lock<std::mutex> held(lock);
        sleepers++;
        wake.wait(held, [&] { return step.load() != seen && step.load() % 2; });
        sleepers--;
      }
      seen = step.load();
      here->store(1);
      // a program is freed once no helper is inside
      if (step.load() == seen && seen % 2 && index + 1 < threads.load())
        go_through(program.load(), seen & 0xffffffff, threads.load(), thread);
      here->store(0);
    }
  }

  void run_step(Program *next, i64 count) {
    std::lock_guard<std::mutex> alone(one);
    while (static_cast<i64>(inside.size()) + 1 < count) {
      auto *here = new std::atomic<int>(0);
      i64 index = inside.size();
      inside.push_back(here);
      std::thread([this, index, here] { help(index, here); }).detach();
    }
    uint64_t number = step.load() + 1, base = (number & 0xffffffff) << 32;
    for (Phase &phase : next->phases) {
      phase.done.store(base);
      phase.next.store(base);
    }
    program.store(next);
    threads.store(count);
    {
      std::lock_guard<std::mutex> held(lock);  // no helper falls asleep in between
      step.store(number);
    }
    if (sleepers.load()) wake.notify_all();
    go_through(next, number & 0xffffffff, count, own);
    step.store(number + 1);
  }

  void free(Program *old) {
    std::lock_guard<std::mutex> alone(one);
    for (auto *here : inside)
      while (here->load()) std::this_thread::yield();
    delete old;
  }
};

Pool &pool() {
  static Pool *found = new Pool;  // never destroyed: helpers may outlive what is
  return *found;
}

}  // namespace

extern "C" void *tachyscope_new(const Op *ops, i64 count) {
  i64 phases = 0;
  for (i64 i = 0; i < count; i++) phases += phases_of(ops[i]);
  return new Program{ops, count, std::vector<Phase>(phases)};
}

extern "C" void tachyscope_run(void *program, i32 *numbers, i64 threads) {
  pool().run_step(static_cast<Program *>(program), threads);
  if (numbers) {
    numbers[0]++;
    numbers[1]++;
  }
}

extern "C" void tachyscope_free(void *program) { pool().free(static_cast<Program *>(program)); }
