/* Launches of Triton kernels: the arguments are packed here and handed to the driver.
 *
 * A launch has variants: what Triton compiled for one combination of what it specializes on (alignment of
 * addresses, divisibility and width of integers, the values that an autotuner is keyed by). A combination
 * that is not among them goes through Triton's own Python code, which compiles it, and says what it ran.
 */
#ifndef TRIDENT_LAUNCH_H
#define TRIDENT_LAUNCH_H

#include <Python.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace trident {

/* What a kernel may be passed, and what its variants may depend on: a tensor's slot, or a row. */
struct LaunchArgument {
  enum class Kind { tensor, integer, real };
  Kind kind;
  int place;
  bool by_value; /* the variants depend on the number itself */
};

struct LaunchParameter {
  enum class Type { pointer, i32, u32, i64, u64, f32, f64, constant, scratch };
  Type type;
  int argument;  /* unless it is constant */
  uint64_t bits; /* of a constant */
};

using LaunchKey = c10::SmallVector<uint64_t, 4>;

struct LaunchVariant {
  LaunchKey key;
  void *function = nullptr;
  unsigned threads = 0, shared = 0, ctas = 1;
  bool cooperative = false, programmatic = false;
  std::array<std::pair<bool, int64_t>, 3> grid{}; /* is it a row, the row or the number */
  std::vector<LaunchParameter> parameters;
  PyObject *config = nullptr; /* the autotuner's choice, which it keeps as its attribute; borrowed */
  int64_t scratch = 0, scratch_align = 0; /* bytes of scratch memory for a block of the grid */
  PyObject *allocate = nullptr; /* allocate(bytes, align, stream) gives them; borrowed, a module's */
};

struct ProgramLaunch {
  std::vector<LaunchArgument> arguments;
  PyObject *python; /* called with the list of arguments: launches; borrowed from who made the program */
  PyObject *autotuner; /* borrowed, or null */
  bool is_keyed; /* false: there is one variant, from the start */
  std::mutex mutex;
  std::vector<std::shared_ptr<const LaunchVariant>> variants; /* the last one used first */
};

/* What the driver's functions do. The layout is that of CUDA's CUlaunchConfig and CUlaunchAttribute. */
struct LaunchAttribute {
  int32_t id;
  char pad[4];
  union {
    char bytes[64];
    int32_t number;
    uint32_t cluster[3];
  } value;
};
struct LaunchConfig {
  uint32_t grid[3], block[3], shared;
  void *stream;
  LaunchAttribute *attributes;
  uint32_t n_attributes;
};
using LaunchFunction = int (*)(const LaunchConfig *, void *function, void **parameters, void **extra);

/* Takes CUDA's driver, which must be there. What is missing, or null. */
const char *launch_use_cuda();
/* Takes a function instead of a driver, for tensors on the CPU: device and stream are 0. */
void launch_use_function(uintptr_t address);

/* The key of the variant that these arguments need; `slots` and `integers` are a program's. */
LaunchKey launch_key(const ProgramLaunch &launch, const at::Tensor *slots, const int64_t *integers);

enum class Launched { yes, unknown, failed };
/* Launches. unknown: no variant has this key, or a number does not fit; failed: the driver refused. Then nothing
 * has happened (but that scratch memory was asked for). `config`: an autotuner's choice, unless null. Throws
 * python_error where the allocator raises. */
Launched launch(ProgramLaunch *launch, const LaunchKey &key, const at::Tensor *slots, const int64_t *integers,
                PyObject **config);

/* Adds what Python describes: (function, threads, shared, ctas, cooperative, programmatic, [(is it a row, row or
 * number)] * 3, [(type, argument, bits)], config or None, (scratch bytes of a block, align, allocate) or None,
 * …), for that key. False with a Python error set. */
bool launch_add_variant(ProgramLaunch *launch, LaunchKey key, PyObject *description);

} // namespace trident
#endif
