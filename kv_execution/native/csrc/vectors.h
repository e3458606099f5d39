// Vectors of one instruction set in GCC's and clang's vector extensions: PAGED_VECTOR_BYTES wide.
//
// For:      loads that widen bfloat16, int8 and fp8, sums across lanes, transposition, exp and tanh.
// Not for:  intrinsics (but to widen bytes): the same text compiles everywhere. Included once per instruction-set build,
//           inside that build's namespace, so that no inline function of one build is linked into another.

constexpr int kBytes = PAGED_VECTOR_BYTES;
constexpr int kLanes = kBytes / 4;

typedef float Vec __attribute__((vector_size(kBytes)));
typedef int32_t Int __attribute__((vector_size(kBytes)));
typedef uint16_t Half __attribute__((vector_size(kBytes / 2)));

// An element of a float8_e4m3fn pool: sign, 4 bits of exponent with bias 7, 3 of mantissa. No infinity; pools hold no NaN.
struct Float8 {
  uint8_t bits;
};

#define PAGED_INLINE static inline __attribute__((always_inline))

PAGED_INLINE Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

PAGED_INLINE Vec load(const uint16_t* from) {
  Half half;
  std::memcpy(&half, from, sizeof half);
  return (Vec)(__builtin_convertvector(half, Int) << 16);
}

// Bytes as integers. GCC 12 would convert a vector of bytes one by one, so here the instruction is named.
#if defined(__AVX512F__)
PAGED_INLINE Int widened(const int8_t* from) { return (Int)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)); }
PAGED_INLINE Int widened(const uint8_t* from) { return (Int)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)); }
#elif defined(__AVX2__)
PAGED_INLINE Int widened(const int8_t* from) { return (Int)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
PAGED_INLINE Int widened(const uint8_t* from) { return (Int)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)); }
#else
template <class Narrow>
PAGED_INLINE Int widened(const Narrow* from) {
  typedef Narrow Bytes __attribute__((vector_size(kBytes / 4)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Int);
}
#endif

PAGED_INLINE Vec load(const int8_t* from) { return __builtin_convertvector(widened(from), Vec); }

// Exact, and without a subnormal float on the way: threads that flush those would read other numbers.
PAGED_INLINE Vec load(const Float8* from) {
  const Int bits = widened(&from->bits), magnitude = bits & 0x7f;
  const Int tiny = magnitude < 8;  // exponent 0: mantissa / 8 * 2^-6, made as (1 + mantissa / 8) * 2^-6 less 2^-6
  const Vec number = (Vec)((magnitude << 20) + (120 << 23) - (tiny << 23)) - (Vec)(tiny & 0x3c800000);
  return (Vec)((Int)number | (bits & 0x80) << 24);
}

PAGED_INLINE void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

PAGED_INLINE Vec splat(float x) { return Vec{} + x; }

// a where mask, else b.
PAGED_INLINE Vec select(Int mask, Vec a, Vec b) { return mask ? a : b; }

// A NaN in b never wins, so it stays where it is and shows up in the sum of weights.
PAGED_INLINE Vec larger(Vec a, Vec b) { return select(b > a, b, a); }

#if defined(__clang__)
#define PAGED_SHUFFLE(a, b, index) __builtin_shufflevector(a, b, index(lane)...)
#else
#define PAGED_SHUFFLE(a, b, index) __builtin_shuffle(a, b, Int{index(lane)...})
#endif

template <int kBlock>
struct Fold {
  static constexpr int first(int lane) {
    const int block = lane / (kBlock / 2);
    return (block % 2 ? kLanes : 0) + block / 2 * kBlock + lane % (kBlock / 2);
  }
  static constexpr int second(int lane) { return first(lane) + kBlock / 2; }
};

template <int kBlock, int... lane>
PAGED_INLINE Vec fold_lanes(Vec a, Vec b, std::integer_sequence<int, lane...>) {
  return PAGED_SHUFFLE(a, b, Fold<kBlock>::first) + PAGED_SHUFFLE(a, b, Fold<kBlock>::second);
}

// Lane i of the result is the sum of all lanes of sums[start + i * step]: a tree of additions, kCount = kLanes leaves.
template <int kCount>
PAGED_INLINE Vec sum_each(const Vec* sums, int start, int step) {
  if constexpr (kCount == 1) {
    return sums[start];
  } else {
    const Vec even = sum_each<kCount / 2>(sums, start, step * 2);
    const Vec odd = sum_each<kCount / 2>(sums, start + step, step * 2);
    return fold_lanes<2 * kLanes / kCount>(even, odd, std::make_integer_sequence<int, kLanes>{});
  }
}

template <int kStep>
struct Swap {
  static constexpr int low(int lane) { return lane & kStep ? kLanes + lane - kStep : lane; }
  static constexpr int high(int lane) { return lane & kStep ? kLanes + lane : lane + kStep; }
};

template <int kStep, int... lane>
PAGED_INLINE void swap_lanes(Vec& a, Vec& b, std::integer_sequence<int, lane...>) {
  const Vec low = PAGED_SHUFFLE(a, b, Swap<kStep>::low), high = PAGED_SHUFFLE(a, b, Swap<kStep>::high);
  a = low;
  b = high;
}

// Transposes a square of kLanes vectors in place.
template <int kStep = kLanes / 2>
PAGED_INLINE void transpose(Vec* rows) {
  if constexpr (kStep > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++)
      if (!(i & kStep)) swap_lanes<kStep>(rows[i], rows[i | kStep], std::make_integer_sequence<int, kLanes>{});
    transpose<kStep / 2>(rows);
  }
}

template <int kStep>
struct Across {
  static constexpr int index(int lane) { return lane ^ kStep; }
};

template <int kStep, int... lane>
PAGED_INLINE Vec across(Vec v, std::integer_sequence<int, lane...>) {
  return PAGED_SHUFFLE(v, v, Across<kStep>::index);
}

template <int kStep = kLanes / 2>
PAGED_INLINE float sum_lanes(Vec v) {
  if constexpr (kStep == 0)
    return v[0];
  else
    return sum_lanes<kStep / 2>(v + across<kStep>(v, std::make_integer_sequence<int, kLanes>{}));
}

template <int kStep = kLanes / 2>
PAGED_INLINE float max_lanes(Vec v) {
  if constexpr (kStep == 0)
    return v[0];
  else
    return max_lanes<kStep / 2>(larger(v, across<kStep>(v, std::make_integer_sequence<int, kLanes>{})));
}

// exp of x <= 0 to about one unit in the last place; 0 below -87 (-inf included), NaN of NaN.
PAGED_INLINE Vec exp_of(Vec x) {
  const Int tiny = x < -87.0f;
  const Vec clamped = select(tiny, splat(-87.0f), x);
  // Adding and taking away 1.5 * 2^23 rounds to the nearest integer.
  const Vec n = (clamped * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  const Vec r = clamped - n * 0.693359375f - n * -2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Vec power = (Vec)((__builtin_convertvector(n, Int) + 127) << 23);
  return select(tiny, Vec{}, p * power);
}

// tanh to a few units in the last place, near 0 too: the rational approximation that Eigen and XLA use.
PAGED_INLINE Vec tanh_of(Vec x) {
  const float limit = 7.90531110763549805f;
  x = select(x > limit, splat(limit), x);
  x = select(x < -limit, splat(-limit), x);
  const Vec y = x * x;
  Vec p = y * -2.76076847742355e-16f + 2.00018790482477e-13f;
  p = p * y + -8.60467152213735e-11f;
  p = p * y + 5.12229709037114e-08f;
  p = p * y + 1.48572235717979e-05f;
  p = p * y + 6.37261928875436e-04f;
  p = p * y + 4.89352455891786e-03f;
  Vec q = y * 1.19825839466702e-06f + 1.18534705686654e-04f;
  q = q * y + 2.26843463243900e-03f;
  q = q * y + 4.89352518554385e-03f;
  return x * p / q;
}
