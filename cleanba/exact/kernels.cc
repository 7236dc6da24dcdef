// Matrix products, convolutions and pooling for XLA on a CPU, with the same bits on every processor.
//
// An element of a result is a sum of products a[k] * b[k]. It is computed in pieces. A piece is one chain of
// fused multiply-adds in the order of k,
//
//     sum = 0;  for k in piece:  sum = fma(a[k], b[k], sum)
//
// and pieces are added in their order. What the pieces are depends on shapes alone, and IEEE 754 defines fma
// to the last bit. So processors, vector widths, tiles and threads decide only how fast an element is
// computed. The compiler has to keep to this as well: -ffp-contract=off, and no -ffast-math. All threads that
// call these functions are XLA's, which flush subnormal numbers to zero.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Size = std::int64_t;
using Input = ffi::Buffer<ffi::F32>;
using Output = ffi::ResultBuffer<ffi::F32>;

// Elements in a piece of a matrix product; a piece of a kernel's gradient has at most as many pixels, or is
// one row of an image. Short enough that a chain loses little precision, and that a piece fits a cache.
constexpr Size kPiece = 512;

// With fewer multiplications than this for each thread, a further thread does not pay off.
constexpr double kSerial = 2e5;

// Images whose kernel gradients are computed before they are added, which bounds the memory they take.
constexpr Size kImages = 64;

// Parts of a product are multiples of the largest tile of any instruction set.
constexpr Size kRows = 12, kColumns = 32;

// The left factor. k consists of runs: element [m, r * length + j] is at data[m * row + r * run + j * column].
// The runs of a convolution are the rows of an image; a matrix has one run.
struct Left {
  const float* data;
  Size row, column, run;
};

// The right factor: element [k, n] is at data[k * row + n * column].
struct Right {
  const float* data;
  Size row, column;
};

struct Result {
  float* data;
  Size row, column;
};

struct Shape {
  Size m, n, runs, length;
};

#define ALWAYS_INLINE __attribute__((always_inline)) inline

// Multiplies ROWS rows by `columns` of COLUMNS columns, which are next to each other in `right`.
template <int ROWS, int COLUMNS>
ALWAYS_INLINE void multiply_tile(const Left& left, const Right& right, const Result& result, const Shape& shape,
                                 Size columns, bool add) {
#ifdef __clang__  // which does not vectorize the loop over the columns
  typedef float Columns __attribute__((ext_vector_type(COLUMNS), aligned(sizeof(float))));
  Columns sum[ROWS] = {};
#else
  float sum[ROWS][COLUMNS] = {};
#endif
  const float* b = right.data;
  for (Size run = 0; run < shape.runs; ++run) {
    const float* a = left.data + run * left.run;
    for (Size k = 0; k < shape.length; ++k, a += left.column, b += right.row) {
#pragma GCC unroll 12
      for (int i = 0; i < ROWS; ++i) {
#ifdef __clang__
        const auto& columns_of_b = *reinterpret_cast<const Columns*>(b);
        sum[i] = __builtin_elementwise_fma(Columns(a[i * left.row]), columns_of_b, sum[i]);
#else
#pragma omp simd
        for (int j = 0; j < COLUMNS; ++j) sum[i][j] = __builtin_fmaf(a[i * left.row], b[j], sum[i][j]);
#endif
      }
    }
  }
  for (int i = 0; i < ROWS; ++i) {
    float* c = result.data + i * result.row;
    if (columns == COLUMNS && result.column == 1) {
      for (int j = 0; j < COLUMNS; ++j) c[j] = add ? c[j] + sum[i][j] : sum[i][j];
    } else {
      for (Size j = 0; j < columns; ++j) {
        float& element = c[j * result.column];
        element = add ? element + sum[i][j] : sum[i][j];
      }
    }
  }
}

// Multiplies all rows from `m` on, as long as ROWS of them are left.
template <int ROWS, int COLUMNS>
ALWAYS_INLINE Size multiply_rows(Size m, Left left, const Right& right, Result result, const Shape& shape,
                                 Size columns, bool add) {
  left.data += m * left.row;
  result.data += m * result.row;
  for (; m + ROWS <= shape.m; m += ROWS) {
    multiply_tile<ROWS, COLUMNS>(left, right, result, shape, columns, add);
    left.data += ROWS * left.row;
    result.data += ROWS * result.row;
  }
  return m;
}

// Returns COLUMNS columns next to each other, those beyond `columns` zero, in a buffer of this thread.
template <int COLUMNS>
ALWAYS_INLINE Right pack(const Right& right, Size depth, Size columns) {
  static thread_local std::vector<float> buffer;
  constexpr Size kLine = 64 / sizeof(float), kBlock = 16;
  if (Size(buffer.size()) < depth * COLUMNS + kLine) buffer.resize(depth * COLUMNS + kLine);
  float* packed = buffer.data();
  while (reinterpret_cast<std::uintptr_t>(packed) % (kLine * sizeof(float))) ++packed;
  if (columns < COLUMNS) std::fill_n(packed, depth * COLUMNS, 0.0f);
  if (right.column == 1) {
    for (Size k = 0; k < depth; ++k) std::copy_n(right.data + k * right.row, columns, packed + k * COLUMNS);
  } else {
    for (Size block = 0; block < depth; block += kBlock)
      for (Size j = 0; j < columns; ++j)
        for (Size k = block; k < std::min(block + kBlock, depth); ++k)
          packed[k * COLUMNS + j] = right.data[k * right.row + j * right.column];
  }
  return {packed, COLUMNS, 1};
}

// One piece of a product: result = left @ right, or result += left @ right.
template <int ROWS, int COLUMNS>
ALWAYS_INLINE void multiply_piece(const Left& left, Right right, Result result, const Shape& shape, bool add) {
  for (Size n = 0; n < shape.n; n += COLUMNS) {
    const Size columns = std::min<Size>(COLUMNS, shape.n - n);
    const bool reused = shape.m > 4 * ROWS && right.row != COLUMNS;
    const Right panel = right.column != 1 || columns < COLUMNS || reused
                            ? pack<COLUMNS>(right, shape.runs * shape.length, columns)
                            : right;
    Size m = multiply_rows<ROWS, COLUMNS>(0, left, panel, result, shape, columns, add);
    if constexpr (ROWS > 8) m = multiply_rows<8, COLUMNS>(m, left, panel, result, shape, columns, add);
    m = multiply_rows<4, COLUMNS>(m, left, panel, result, shape, columns, add);
    m = multiply_rows<2, COLUMNS>(m, left, panel, result, shape, columns, add);
    multiply_rows<1, COLUMNS>(m, left, panel, result, shape, columns, add);
    right.data += COLUMNS * right.column;
    result.data += COLUMNS * result.column;
  }
}

using Multiply = void(const Left&, const Right&, const Result&, const Shape&, bool add);

void multiply_anywhere(const Left& left, const Right& right, const Result& result, const Shape& shape, bool add) {
  multiply_piece<6, 8>(left, right, result, shape, add);
}

#if defined(__x86_64__)
#define AVX2 "avx2,fma"
#ifdef __clang__
#define AVX512 AVX2 ",avx512f"
#else
#define AVX512 AVX2 ",avx512f,prefer-vector-width=512"  // GCC prefers 256 bits
#endif

__attribute__((target(AVX2))) void multiply_avx2(const Left& left, const Right& right, const Result& result,
                                                       const Shape& shape, bool add) {
  if (shape.n > 8) {
    multiply_piece<6, 16>(left, right, result, shape, add);
  } else {
    multiply_piece<6, 8>(left, right, result, shape, add);
  }
}

__attribute__((target(AVX512))) void multiply_avx512(const Left& left, const Right& right, const Result& result,
                                                     const Shape& shape, bool add) {
  if (shape.n > 16) {
    multiply_piece<12, 32>(left, right, result, shape, add);
  } else {
    multiply_piece<12, 16>(left, right, result, shape, add);
  }
}
#endif

Multiply* choose_multiply() {
#if defined(MULTIPLY)  // for tests
  return MULTIPLY;
#elif defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("fma")) return multiply_avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return multiply_avx2;
#endif
  return multiply_anywhere;
}

Multiply* const multiply = choose_multiply();

// Calls part(0) to part(count - 1), on this thread and on XLA's pool. It waits only for parts that a thread has
// begun, so it ends even if every thread of the pool is here.
template <class Part>
void in_parallel(ffi::ThreadPool& pool, Size count, Part part) {
  struct Progress {
    std::atomic<Size> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable finished;
  };
  auto progress = std::make_shared<Progress>();
  auto work = [progress, count, part] {
    for (Size i; (i = progress->next++) < count;) {
      part(i);
      if (++progress->done == count) {
        std::lock_guard<std::mutex> lock(progress->mutex);
        progress->finished.notify_all();
      }
    }
  };
  for (Size i = 1; i < std::min<Size>(count, pool.num_threads()); ++i) pool.Schedule(decltype(work)(work));
  work();
  std::unique_lock<std::mutex> lock(progress->mutex);
  progress->finished.wait(lock, [&] { return progress->done == count; });
}

// Returns the number of parts for some multiplications: a few for each thread, at most `most`.
Size number_of_parts(const ffi::ThreadPool& pool, double multiplications, Size most) {
  const Size threads = pool.num_threads();
  if (threads == 1) return 1;
  return std::max<Size>(1, std::min({Size(multiplications / kSerial), 4 * threads, most}));
}

// a [M, K] @ b [K, N], each of them given transposed or not. Pieces are kPiece elements of K.
ffi::Error matmul(ffi::ThreadPool pool, Input a, Input b, Output c, bool transpose_a, bool transpose_b) {
  const auto a_shape = a.dimensions(), b_shape = b.dimensions();
  Size m = a_shape[0], depth = a_shape[1], n = b_shape[1];
  Left left{a.typed_data(), depth, 1, 0};
  Right right{b.typed_data(), n, 1};
  if (transpose_a) {
    std::swap(m, depth);
    std::swap(left.row, left.column);
  }
  if (transpose_b) {
    n = b_shape[0];
    std::swap(right.row, right.column);
  }
  Result result{c->typed_data(), n, 1};
  if (transpose_b && m * (depth + n) < n * depth) {
    // c.T = b.T @ a.T, because transposing a and c costs less than transposing b.
    const Left factor = left;
    left = {right.data, right.column, right.row, 0};
    right = {factor.data, factor.column, factor.row};
    std::swap(m, n);
    std::swap(result.row, result.column);
  }
  const bool by_rows = m > n;
  const Size extent = by_rows ? m : n, unit = by_rows ? kRows : kColumns;
  const Size units = (extent + unit - 1) / unit;
  const Size parts = number_of_parts(pool, double(m) * depth * n, units);
  in_parallel(pool, parts, [=](Size i) {
    const Size first = units * i / parts * unit, last = std::min(extent, units * (i + 1) / parts * unit);
    Shape shape{by_rows ? last - first : m, by_rows ? n : last - first, 1, 0};
    Left l = left;
    Right r = right;
    Result part = result;
    (by_rows ? l.data : r.data) += first * (by_rows ? l.row : r.column);
    part.data += first * (by_rows ? part.row : part.column);
    for (Size k = 0; k < depth; k += kPiece) {
      shape.length = std::min(kPiece, depth - k);
      multiply(l, r, part, shape, k > 0);
      l.data += kPiece * l.column;
      r.data += kPiece * r.row;
    }
  });
  return ffi::Error::Success();
}

struct Image {
  Size height, width, channels;
};

// Returns `count` rows of an image from row `first` on, with `before` and `after` zeros around the image.
const float* padded_rows(const float* x, Image image, Size before, Size after, Size first, Size count) {
  const Size row = image.width * image.channels;
  if (before == 0 && after == 0) return x + first * row;
  static thread_local std::vector<float> buffer;
  const Size padded_row = row + (before + after) * image.channels;
  buffer.assign(count * padded_row, 0.0f);
  for (Size i = std::max<Size>(0, before - first); i < count && first + i - before < image.height; ++i)
    std::copy_n(x + (first + i - before) * row, row, buffer.data() + i * padded_row + before * image.channels);
  return buffer.data();
}

// x [B, H, W, C] convolved with kernel [k, k, C, F], with stride 1. One piece: all of k, k, C.
ffi::Error convolve(ffi::ThreadPool pool, Input x, Input kernel, Output y, Size before, Size after) {
  const auto x_shape = x.dimensions(), kernel_shape = kernel.dimensions(), y_shape = y->dimensions();
  const Image image{x_shape[1], x_shape[2], x_shape[3]};
  const Size size = kernel_shape[0], features = kernel_shape[3];
  const Size batch = y_shape[0], height = y_shape[1], width = y_shape[2];
  const Size row = (image.width + before + after) * image.channels;
  const Shape shape{width, features, size, size * image.channels};
  const Right right{kernel.typed_data(), features, 1};
  const float* images = x.typed_data();
  float* results = y->typed_data();
  const Size rows = batch * height;
  const Size parts = number_of_parts(pool, double(rows) * shape.m * shape.n * shape.runs * shape.length, rows);
  in_parallel(pool, parts, [=](Size part) {
    Size first = rows * part / parts;
    const Size last = rows * (part + 1) / parts;
    while (first < last) {
      const Size i = first / height, h = first % height, count = std::min(height - h, last - first);
      const float* pixels = images + i * image.height * image.width * image.channels;
      pixels = padded_rows(pixels, image, before, after, h, count + size - 1);
      for (Size end = first + count; first < end; ++first, pixels += row)
        multiply({pixels, image.channels, 1, row}, right, {results + first * width * features, features, 1}, shape, false);
    }
  });
  return ffi::Error::Success();
}

// Gradient of `convolve` for the kernel: x [B, H, W, C] and the result's gradient [B, H', W', F] to [k, k, C, F].
// Pieces are rows of an image; the sums of the images are added in their order.
ffi::Error convolve_kernel_gradient(ffi::ThreadPool pool, Input x, Input gradient, Output result, Size before,
                                    Size after) {
  const auto x_shape = x.dimensions(), shape = gradient.dimensions(), result_shape = result->dimensions();
  const Image image{x_shape[1], x_shape[2], x_shape[3]};
  const Size batch = shape[0], height = shape[1], width = shape[2], features = shape[3], size = result_shape[0];
  const Size row = (image.width + before + after) * image.channels, m = size * image.channels;
  const Size elements = size * m * features, step = std::max<Size>(1, kPiece / width);
  const float *images = x.typed_data(), *gradients = gradient.typed_data();
  float* total = result->typed_data();
  // Computes `count` of the m rows of sum[k] for image `i`, or adds them, if the image is one piece.
  const auto multiply_image = [=](Size i, const float* pixels, Size k, Size first, Size count, float* sum, bool add) {
    for (Size h = 0; h < height; h += step)
      multiply({pixels + (h + k) * row + first, 1, image.channels, row},
               {gradients + (i * height + h) * width * features, features, 1},
               {sum + (k * m + first) * features, features, 1},
               {count, features, std::min(step, height - h), width}, add || h > 0);
  };
  const auto padded = [=](Size i) {
    const float* pixels = images + i * image.height * image.width * image.channels;
    return padded_rows(pixels, image, before, after, 0, image.height + before + after);
  };
  if (height <= step) {  // in place: each part is some rows of the result
    const Size blocks = (m + kRows - 1) / kRows, units = size * blocks;
    const Size parts = number_of_parts(pool, double(batch) * height * width * elements, units);
    in_parallel(pool, parts, [=](Size part) {
      for (Size i = 0; i < batch; ++i) {
        const float* pixels = padded(i);
        const Size last = units * (part + 1) / parts;
        for (Size unit = units * part / parts; unit < last;) {
          const Size k = unit / blocks, first = unit % blocks * kRows;
          const Size end = std::min(last, (k + 1) * blocks);
          multiply_image(i, pixels, k, first, std::min((end - k * blocks) * kRows, m) - first, total, i > 0);
          unit = end;
        }
      }
    });
    return ffi::Error::Success();
  }
  const std::unique_ptr<float[]> buffer(new float[std::min(batch, kImages) * elements]);
  float* const sums = buffer.get();
  for (Size first = 0; first < batch; first += kImages) {
    const Size count = std::min(kImages, batch - first);
    in_parallel(pool, count, [=](Size n) {
      const float* pixels = padded(first + n);
      for (Size k = 0; k < size; ++k) multiply_image(first + n, pixels, k, 0, m, sums + n * elements, false);
    });
    if (first == 0) std::copy_n(sums, elements, total);
    for (Size n = first == 0; n < count; ++n)
      for (Size j = 0; j < elements; ++j) total[j] += sums[n * elements + j];
  }
  return ffi::Error::Success();
}

// Windows of three with stride 2 along an axis, padded as SAME. Missing elements are minus infinity.
struct Windows {
  Size size, count, before;
  explicit Windows(Size size) : size(size), count((size + 1) / 2), before(((count - 1) * 2 + 3 - size) / 2) {}
  Size first(Size window) const { return 2 * window - before; }
};

// The larger of two numbers, or NaN if one is NaN.
ALWAYS_INLINE float larger(float a, float b) {
  const float number = a > b ? a : b;
  return a != a ? a : number;
}

// How much of the gradient of `largest`, the larger of a and b, a receives. Equal numbers receive half each, as in
// jax.numpy.maximum.
ALWAYS_INLINE float share(float a, float b, float largest) {
  const float part = b == largest ? 0.5f : 1.0f;
  return a == largest ? part : 0.0f;
}

// Returns row `i` of x [windows.size, n], or `missing` beyond its ends.
template <class Float>
ALWAYS_INLINE Float* row_or(Float* x, const Windows& windows, Size n, Size i, Float* missing) {
  return i < 0 || i >= windows.size ? missing : x + i * n;
}

// The maximum of each window of x [windows.size, n]: y [windows.count, n].
void max_of_windows(const float* x, const Windows& windows, Size n, const float* missing, float* __restrict y) {
  for (Size i = 0; i < windows.count; ++i, y += n) {
    const float* a = row_or(x, windows, n, windows.first(i), missing);
    const float* b = row_or(x, windows, n, windows.first(i) + 1, missing);
    const float* c = row_or(x, windows, n, windows.first(i) + 2, missing);
#pragma omp simd
    for (Size j = 0; j < n; ++j) y[j] = larger(larger(a[j], b[j]), c[j]);
  }
}

// Gradient of `max_of_windows` for x, from that of its result. `ignored` is memory for n elements.
void max_of_windows_gradient(const float* x, const float* gradient, const Windows& windows, Size n,
                             const float* missing, float* ignored, float* result) {
  if (windows.first(0) == 0) std::fill_n(result, n, 0.0f);
  for (Size i = 0; i < windows.count; ++i, gradient += n) {
    const Size first = windows.first(i);
    const float* a = row_or(x, windows, n, first, missing);
    const float* b = row_or(x, windows, n, first + 1, missing);
    const float* c = row_or(x, windows, n, first + 2, missing);
    float* __restrict of_a = row_or(result, windows, n, first, ignored);  // also c of the window before
    float* __restrict of_b = row_or(result, windows, n, first + 1, ignored);
    float* __restrict of_c = row_or(result, windows, n, first + 2, ignored);
#pragma omp simd
    for (Size j = 0; j < n; ++j) {
      const float ab = larger(a[j], b[j]), abc = larger(ab, c[j]);
      const float of_ab = gradient[j] * share(ab, c[j], abc);
      of_a[j] += of_ab * share(a[j], b[j], ab);
      of_b[j] = of_ab * share(b[j], a[j], ab);
      of_c[j] = gradient[j] * share(c[j], ab, abc);
    }
  }
}

// Calls part(image, buffer, missing) for each image of x [B, H, W, C], in parallel. `missing` has W * C elements.
template <class Part>
void for_images(ffi::ThreadPool& pool, Input x, Size buffer_size, Part part) {
  const auto shape = x.dimensions();
  const Size batch = shape[0], row = shape[2] * shape[3];
  const Size parts = number_of_parts(pool, double(batch) * shape[1] * row, batch);
  in_parallel(pool, parts, [=](Size i) {
    static thread_local std::vector<float> buffer, missing;
    if (Size(buffer.size()) < buffer_size) buffer.resize(buffer_size);
    missing.assign(row, -std::numeric_limits<float>::infinity());
    for (Size image = batch * i / parts; image < batch * (i + 1) / parts; ++image)
      part(image, buffer.data(), missing.data());
  });
}

// x [B, H, W, C] max-pooled with 3x3 windows and stride 2, padded as SAME: along H, then along W.
ffi::Error max_pool(ffi::ThreadPool pool, Input x, Output y) {
  const auto shape = x.dimensions();
  const Windows rows(shape[1]), columns(shape[2]);
  const Size channels = shape[3], row = columns.size * channels;
  const float* images = x.typed_data();
  float* results = y->typed_data();
  for_images(pool, x, rows.count * row, [=](Size image, float* pooled, const float* missing) {
    max_of_windows(images + image * rows.size * row, rows, row, missing, pooled);
    float* result = results + image * rows.count * columns.count * channels;
    for (Size i = 0; i < rows.count; ++i)
      max_of_windows(pooled + i * row, columns, channels, missing, result + i * columns.count * channels);
  });
  return ffi::Error::Success();
}

// Gradient of `max_pool` for x, from that of its result.
ffi::Error max_pool_gradient(ffi::ThreadPool pool, Input x, Input gradient, Output result) {
  const auto shape = x.dimensions();
  const Windows rows(shape[1]), columns(shape[2]);
  const Size channels = shape[3], row = columns.size * channels, half = rows.count * row;
  const float *images = x.typed_data(), *gradients = gradient.typed_data();
  float* results = result->typed_data();
  for_images(pool, x, 2 * half + row, [=](Size image, float* pooled, const float* missing) {
    float *of_pooled = pooled + half, *ignored = of_pooled + half;
    const float* pixels = images + image * rows.size * row;
    max_of_windows(pixels, rows, row, missing, pooled);
    const float* of_result = gradients + image * rows.count * columns.count * channels;
    for (Size i = 0; i < rows.count; ++i)
      max_of_windows_gradient(pooled + i * row, of_result + i * columns.count * channels, columns, channels, missing,
                              ignored, of_pooled + i * row);
    max_of_windows_gradient(pixels, of_pooled, rows, row, missing, ignored, results + image * rows.size * row);
  });
  return ffi::Error::Success();
}

auto binding() {
  return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Input>().Arg<Input>().Ret<ffi::Buffer<ffi::F32>>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(cleanba_matmul, matmul,
                              binding().Attr<bool>("transpose_a").Attr<bool>("transpose_b"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(cleanba_convolve, convolve, binding().Attr<Size>("before").Attr<Size>("after"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(cleanba_convolve_kernel_gradient, convolve_kernel_gradient,
                              binding().Attr<Size>("before").Attr<Size>("after"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(cleanba_max_pool, max_pool,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Input>().Ret<ffi::Buffer<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(cleanba_max_pool_gradient, max_pool_gradient, binding());
