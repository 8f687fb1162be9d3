#include "launch.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <limits>

namespace py = pybind11;

namespace trident {

namespace {

/* Of cuda.h. */
enum : int32_t {
  kCooperative = 2,
  kClusterDimension = 4,
  kClusterSchedulingPolicy = 5,
  kProgrammaticStreamSerialization = 6,
};
constexpr int kDevicePointer = 3; /* a CUpointer_attribute */
constexpr int32_t kSpread = 1;

LaunchFunction launch_ = nullptr;
bool is_cuda_ = false;
int (*get_context_)(void **) = nullptr;
int (*retain_context_)(void **, int) = nullptr;
int (*set_context_)(void *) = nullptr;
int (*get_attribute_)(void *, int, uint64_t) = nullptr;

const c10::impl::DeviceGuardImplInterface *guard() {
  static const auto *found = c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA);
  return found;
}

c10::DeviceIndex current_device() { return is_cuda_ ? guard()->getDevice().index() : 0; }

void *current_stream() {
  if (!is_cuda_) return nullptr;
  const c10::Stream stream = guard()->getStream(guard()->getDevice());
  return guard()->getStreamNativeHandle(stream);
}

/* As Triton's launcher: a thread that has not used the device yet has no context. */
bool ensure_context() {
  if (!is_cuda_) return true;
  void *context = nullptr;
  if (get_context_(&context) != 0) return false;
  if (context != nullptr) return true;
  return retain_context_(&context, current_device()) == 0 && set_context_(context) == 0;
}

template <class Function>
bool find(void *library, const char *name, Function *out) {
  *out = reinterpret_cast<Function>(dlsym(library, name));
  return *out != nullptr;
}

/* What Triton specializes an int on. */
uint64_t class_of(int64_t value) {
  const bool is_narrow = value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max();
  return (value == 1 ? 1 : 0) | (value % 16 == 0 ? 2 : 0) | (is_narrow ? 4 : 0);
}

/* False if the number does not fit. */
bool pack(const ProgramLaunch &launch, const LaunchParameter &parameter, const at::Tensor *slots,
          const int64_t *integers, uint64_t *out) {
  if (parameter.type == LaunchParameter::Type::constant) {
    *out = parameter.bits;
    return true;
  }
  const int place = launch.arguments[parameter.argument].place;
  switch (parameter.type) {
  case LaunchParameter::Type::pointer:
    *out = slots[place].defined() ? reinterpret_cast<uint64_t>(slots[place].data_ptr()) : 0;
    return !is_cuda_ || !slots[place].defined() || slots[place].is_cuda(); /* of others Triton asks the driver */
  case LaunchParameter::Type::i32:
    *out = static_cast<uint64_t>(integers[place]);
    return integers[place] >= std::numeric_limits<int32_t>::min() &&
           integers[place] <= std::numeric_limits<int32_t>::max();
  case LaunchParameter::Type::u32:
    *out = static_cast<uint64_t>(integers[place]);
    return integers[place] >= 0 && integers[place] <= std::numeric_limits<uint32_t>::max();
  case LaunchParameter::Type::u64:
    *out = static_cast<uint64_t>(integers[place]);
    return integers[place] >= 0;
  case LaunchParameter::Type::f32: {
    double value;
    std::memcpy(&value, &integers[place], sizeof(value));
    const float narrow = static_cast<float>(value);
    *out = 0;
    std::memcpy(out, &narrow, sizeof(narrow));
    return true;
  }
  default:
    *out = static_cast<uint64_t>(integers[place]);
    return true;
  }
}

uint32_t add_attributes(const LaunchVariant &variant, LaunchAttribute *attributes) {
  uint32_t n = 0;
  const auto add = [&](int32_t id, int32_t number) {
    attributes[n] = {};
    attributes[n].id = id;
    attributes[n++].value.number = number;
  };
  if (variant.programmatic) add(kProgrammaticStreamSerialization, 1);
  if (variant.cooperative) add(kCooperative, 1);
  if (variant.ctas != 1) {
    add(kClusterDimension, 0);
    auto &cluster = attributes[n - 1].value.cluster;
    cluster[0] = variant.ctas;
    cluster[1] = cluster[2] = 1;
    add(kClusterSchedulingPolicy, kSpread);
  }
  return n;
}

std::shared_ptr<const LaunchVariant> find_variant(ProgramLaunch *launch, const LaunchKey &key) {
  std::lock_guard<std::mutex> lock(launch->mutex);
  auto &variants = launch->variants;
  for (size_t i = 0; i < variants.size(); i++) {
    if (variants[i]->key != key) continue;
    if (i != 0) std::rotate(variants.begin(), variants.begin() + i, variants.begin() + i + 1);
    return variants[0];
  }
  return nullptr;
}

/* Scratch memory of one launch. */
class Scratch {
public:
  Scratch() = default;
  Scratch(const Scratch &) = delete;
  ~Scratch() {
    if (buffer_ == nullptr) return;
    py::gil_scoped_acquire gil;
    Py_DECREF(buffer_);
  }
  /* The address, as Triton's launcher takes it of what an allocator returns; false if that would raise. */
  bool allocate(const LaunchVariant &variant, int64_t n_blocks, void *stream, uint64_t *address) {
    py::gil_scoped_acquire gil;
    const auto number = static_cast<long long>(reinterpret_cast<intptr_t>(stream));
    buffer_ = PyObject_CallFunction(variant.allocate, "LLL", static_cast<long long>(variant.scratch * n_blocks),
                                    static_cast<long long>(variant.scratch_align), number);
    if (buffer_ == nullptr) throw python_error();
    *address = 0;
    if (buffer_ == Py_None) return true;
    PyObject *found = PyLong_Check(buffer_) ? Py_NewRef(buffer_) : PyObject_CallMethod(buffer_, "data_ptr", nullptr);
    if (found != nullptr) *address = PyLong_AsUnsignedLongLong(found);
    Py_XDECREF(found);
    if (PyErr_Occurred()) {
      PyErr_Clear();
      return false;
    }
    return !is_cuda_ || *address == 0 || PyLong_Check(buffer_) || get_attribute_(address, kDevicePointer, *address) == 0;
  }

private:
  PyObject *buffer_ = nullptr;
};

/* More are possible, but whoever has so many is not bound by the search for them. */
constexpr size_t kMostVariants = 64;

} // namespace

const char *launch_use_cuda() {
  if (is_cuda_) return nullptr;
  void *library = dlopen("libcuda.so.1", RTLD_LAZY);
  if (library == nullptr) return "libcuda.so.1 cannot be loaded";
  LaunchFunction launch;
  if (!find(library, "cuLaunchKernelEx", &launch)) return "the CUDA driver has no cuLaunchKernelEx";
  if (!find(library, "cuCtxGetCurrent", &get_context_) || !find(library, "cuCtxSetCurrent", &set_context_) ||
      !find(library, "cuDevicePrimaryCtxRetain", &retain_context_) ||
      !find(library, "cuPointerGetAttribute", &get_attribute_))
    return "the CUDA driver has no functions for contexts";
  launch_ = launch;
  is_cuda_ = true;
  return nullptr;
}

void launch_use_function(uintptr_t address) {
  launch_ = reinterpret_cast<LaunchFunction>(address);
  is_cuda_ = false;
}

LaunchKey launch_key(const ProgramLaunch &launch, const at::Tensor *slots, const int64_t *integers) {
  LaunchKey key;
  if (!launch.is_keyed) return key;
  uint64_t bits = static_cast<uint64_t>(current_device());
  int n_bits = 8;
  const auto add = [&](uint64_t more, int n) {
    if (n_bits + n > 64) {
      key.push_back(bits);
      bits = 0;
      n_bits = 0;
    }
    bits |= more << n_bits;
    n_bits += n;
  };
  for (const LaunchArgument &argument : launch.arguments) {
    if (argument.kind == LaunchArgument::Kind::tensor) {
      const at::Tensor &tensor = slots[argument.place];
      const bool is_aligned = !tensor.defined() || reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
      add(is_aligned, 1);
      continue;
    }
    if (argument.kind == LaunchArgument::Kind::integer) add(class_of(integers[argument.place]), 3);
    if (argument.by_value) key.push_back(static_cast<uint64_t>(integers[argument.place]));
  }
  key.push_back(bits);
  return key;
}

Launched launch(ProgramLaunch *launch, const LaunchKey &key, const at::Tensor *slots, const int64_t *integers,
                PyObject **config) {
  const std::shared_ptr<const LaunchVariant> variant = find_variant(launch, key);
  if (!variant || launch_ == nullptr) return Launched::unknown;
  LaunchConfig to{};
  int64_t n_blocks = 1;
  for (int i = 0; i < 3; i++) {
    const auto [is_row, number] = variant->grid[i];
    const int64_t size = is_row ? integers[number] : number;
    /* Python's code knows what to do, or to say, with other sizes. */
    if (size <= 0 || size > std::numeric_limits<int32_t>::max()) return Launched::unknown;
    n_blocks *= size;
    if (n_blocks > std::numeric_limits<int32_t>::max()) return Launched::unknown;
    to.grid[i] = static_cast<uint32_t>(size) * (i == 0 ? variant->ctas : 1);
    to.block[i] = i == 0 ? variant->threads : 1;
  }
  const size_t n = variant->parameters.size();
  c10::SmallVector<uint64_t, 32> values(n);
  c10::SmallVector<void *, 32> pointers(n + 1);
  uint64_t *scratch_address = nullptr;
  for (size_t i = 0; i < n; i++) {
    const LaunchParameter &parameter = variant->parameters[i];
    if (parameter.type == LaunchParameter::Type::scratch) scratch_address = &values[i];
    else if (!pack(*launch, parameter, slots, integers, &values[i])) return Launched::unknown;
    pointers[i] = &values[i];
  }
  LaunchAttribute attributes[4];
  to.shared = variant->shared;
  to.attributes = attributes;
  to.n_attributes = add_attributes(*variant, attributes);
  if (!ensure_context()) return Launched::failed;
  to.stream = current_stream();
  Scratch scratch;
  if (scratch_address != nullptr && !scratch.allocate(*variant, n_blocks, to.stream, scratch_address))
    return Launched::unknown;
  if (launch_(&to, variant->function, pointers.data(), nullptr) != 0) return Launched::failed;
  *config = variant->config;
  return Launched::yes;
}

bool launch_add_variant(ProgramLaunch *launch, LaunchKey key, PyObject *description) {
  try {
    auto made = std::make_shared<LaunchVariant>();
    const auto fields = py::reinterpret_borrow<py::tuple>(description);
    made->key = std::move(key);
    made->function = reinterpret_cast<void *>(fields[0].cast<uintptr_t>());
    made->threads = fields[1].cast<unsigned>();
    made->shared = fields[2].cast<unsigned>();
    made->ctas = fields[3].cast<unsigned>();
    made->cooperative = fields[4].cast<bool>();
    made->programmatic = fields[5].cast<bool>();
    const auto grid = fields[6].cast<py::list>();
    for (size_t i = 0; i < 3; i++) {
      const auto size = grid[i].cast<py::tuple>();
      made->grid[i] = {size[0].cast<bool>(), size[1].cast<int64_t>()};
    }
    for (const auto &item : fields[7].cast<py::list>()) {
      const auto parameter = item.cast<py::tuple>();
      const auto type = static_cast<LaunchParameter::Type>(parameter[0].cast<int>());
      const int argument = parameter[1].cast<int>();
      const bool has_argument = type < LaunchParameter::Type::constant;
      if (has_argument && (argument < 0 || static_cast<size_t>(argument) >= launch->arguments.size()))
        throw py::value_error("no such argument of a launch");
      made->parameters.push_back({type, argument, parameter[2].cast<uint64_t>()});
    }
    if (!fields[8].is_none()) made->config = fields[8].ptr();
    if (!fields[9].is_none()) {
      const auto scratch = fields[9].cast<py::tuple>();
      made->scratch = scratch[0].cast<int64_t>();
      made->scratch_align = scratch[1].cast<int64_t>();
      made->allocate = scratch[2].ptr();
    }
    std::lock_guard<std::mutex> lock(launch->mutex);
    auto &variants = launch->variants;
    const auto same = [&](const auto &variant) { return variant->key == made->key; };
    variants.erase(std::remove_if(variants.begin(), variants.end(), same), variants.end());
    if (variants.size() >= kMostVariants) variants.pop_back();
    variants.insert(variants.begin(), std::move(made));
    return true;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return false;
  }
}

} // namespace trident
