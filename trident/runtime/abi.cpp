/* What JIT'd code assumes of the C++ ABI of at::_ops (x86-64 System V, libstdc++): checked by the
 * compiler where it can be, else when the first host program is built. trident/codegen/abi.py uses it. */
#include "program.h"

#include <ATen/core/Generator.h>
#include <ATen/core/IListRef.h>
#include <c10/core/SymInt.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/OptionalArrayRef.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <array>
#include <cstring>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>

namespace trident {

namespace {

template <class T>
constexpr bool in_registers =
    std::is_trivially_copy_constructible_v<T> && std::is_trivially_destructible_v<T>;

static_assert(sizeof(at::Tensor) == 8);
static_assert(sizeof(std::optional<at::Tensor>) == 16);
static_assert(sizeof(std::tuple<at::Tensor, at::Tensor, at::Tensor>) == 24);
static_assert(sizeof(std::vector<at::Tensor>) == 24);
/* Several results, tensors or references to them, come back through a hidden pointer. */
static_assert(!in_registers<std::tuple<at::Tensor, at::Tensor>>);
static_assert(!std::is_trivially_move_constructible_v<std::tuple<at::Tensor &, at::Tensor &>>);
static_assert(!std::is_trivially_move_constructible_v<std::tuple<at::Tensor &, at::Tensor &, at::Tensor &>>);
static_assert(sizeof(std::tuple<at::Tensor &, at::Tensor &, at::Tensor &>) == 24);
static_assert(sizeof(c10::Scalar) == 32 && std::is_same_v<c10::SymIntArrayRef, c10::ArrayRef<c10::SymInt>>);
/* By value, in registers. */
static_assert(sizeof(at::TensorList) == 16 && in_registers<at::TensorList>);
static_assert(sizeof(c10::IntArrayRef) == 16 && in_registers<c10::IntArrayRef>);
static_assert(sizeof(c10::SymIntArrayRef) == 16 && in_registers<c10::SymIntArrayRef>);
static_assert(sizeof(c10::ArrayRef<c10::Scalar>) == 16 && in_registers<c10::ArrayRef<c10::Scalar>>);
static_assert(sizeof(std::array<bool, 2>) == 2 && in_registers<std::array<bool, 2>>);
static_assert(sizeof(std::array<bool, 3>) == 3 && in_registers<std::array<bool, 3>>);
static_assert(sizeof(std::array<bool, 4>) == 4 && in_registers<std::array<bool, 4>>);
static_assert(std::is_same_v<c10::DeviceIndex, int8_t>);
static_assert(sizeof(std::string_view) == 16 && in_registers<std::string_view>);
static_assert(sizeof(std::optional<int64_t>) == 16 && in_registers<std::optional<int64_t>>);
static_assert(sizeof(std::optional<double>) == 16 && in_registers<std::optional<double>>);
static_assert(sizeof(std::optional<bool>) == 2 && in_registers<std::optional<bool>>);
static_assert(sizeof(std::optional<c10::ScalarType>) == 2 && in_registers<std::optional<c10::ScalarType>>);
static_assert(sizeof(std::optional<c10::Layout>) == 2 && in_registers<std::optional<c10::Layout>>);
static_assert(sizeof(std::optional<c10::MemoryFormat>) == 2 && in_registers<std::optional<c10::MemoryFormat>>);
static_assert(sizeof(std::optional<c10::Device>) == 3 && in_registers<std::optional<c10::Device>>);
static_assert(sizeof(c10::Device) == 2 && in_registers<c10::Device>);
static_assert(sizeof(c10::ScalarType) == 1 && sizeof(c10::Layout) == 1 && sizeof(c10::MemoryFormat) == 1);
/* By value, in memory. */
static_assert(sizeof(c10::OptionalIntArrayRef) == 24 && in_registers<c10::OptionalIntArrayRef>);
static_assert(sizeof(at::OptionalSymIntArrayRef) == 24 && in_registers<at::OptionalSymIntArrayRef>);
static_assert(sizeof(std::optional<std::string_view>) == 24 && in_registers<std::optional<std::string_view>>);
static_assert(sizeof(std::optional<c10::ArrayRef<double>>) == 24 && in_registers<std::optional<c10::ArrayRef<double>>>);
/* By pointer to the caller's copy, which the callee may empty. */
static_assert(sizeof(c10::SymInt) == 8 && !in_registers<c10::SymInt>);
static_assert(sizeof(std::optional<c10::SymInt>) == 16 && !in_registers<std::optional<c10::SymInt>>);
static_assert(sizeof(std::optional<at::Generator>) == 16 && !in_registers<std::optional<at::Generator>>);
static_assert(sizeof(at::ITensorListRef) == 24);

/* Does the object start with these bytes (which are as many as it has, without padding at the end)? */
template <class T>
bool holds(const T &object, std::initializer_list<uint8_t> bytes) {
  return std::memcmp(&object, bytes.begin(), bytes.size()) == 0;
}

template <class T>
bool holds_words(const T &object, std::initializer_list<uint64_t> words) {
  return std::memcmp(&object, words.begin(), words.size() * 8) == 0;
}

template <class T>
bool flag_at(const T &object, size_t offset, uint8_t value) {
  return reinterpret_cast<const uint8_t *>(&object)[offset] == value;
}

/* What a number holds, after its tag. */
const uint64_t &value_of(const c10::Scalar &number) { return reinterpret_cast<const uint64_t *>(&number)[2]; }

const char *find_problem() {
  std::tuple<at::Tensor, at::Tensor> pair;
  if (reinterpret_cast<char *>(&std::get<0>(pair)) - reinterpret_cast<char *>(&pair) != 8)
    return "the order of a tuple's elements";
  std::optional<at::Tensor> tensor{at::Tensor()}, no_tensor;
  at::Tensor undefined;
  if (std::memcmp(&tensor, &undefined, 8) != 0 || !flag_at(tensor, 8, 1) || !flag_at(no_tensor, 8, 0))
    return "the layout of an optional tensor";
  at::Tensor copy[2];
  at::TensorList tensors(copy, 2);
  const uint64_t address = reinterpret_cast<uint64_t>(&copy[0]);
  if (!holds_words(tensors, {address, 2})) return "the layout of a tensor list";
  at::ITensorListRef reference(tensors);
  if (!holds_words(reference, {address, 2}) || !reference.isUnboxed()) return "the layout of a list reference";
  std::optional<int64_t> integer(5), no_integer;
  if (!holds_words(integer, {5}) || !flag_at(integer, 8, 1) || !flag_at(no_integer, 8, 0))
    return "the layout of an optional integer";
  std::optional<double> real(1.5), no_real;
  const double expected = 1.5;
  if (std::memcmp(&real, &expected, 8) != 0 || !flag_at(real, 8, 1) || !flag_at(no_real, 8, 0))
    return "the layout of an optional double";
  if (!holds(std::optional<bool>(true), {1, 1}) || !holds(std::optional<bool>(false), {0, 1}) ||
      !flag_at(std::optional<bool>(), 1, 0))
    return "the layout of an optional bool";
  if (!holds(std::optional<c10::ScalarType>(at::kDouble), {static_cast<uint8_t>(at::kDouble), 1}) ||
      !holds(std::optional<c10::Layout>(at::kSparse), {static_cast<uint8_t>(at::kSparse), 1}) ||
      !holds(std::optional<c10::MemoryFormat>(at::MemoryFormat::ChannelsLast),
             {static_cast<uint8_t>(at::MemoryFormat::ChannelsLast), 1}) ||
      !flag_at(std::optional<c10::ScalarType>(), 1, 0) || !flag_at(std::optional<c10::Layout>(), 1, 0) ||
      !flag_at(std::optional<c10::MemoryFormat>(), 1, 0))
    return "the layout of an optional dtype, layout or memory format";
  const c10::Device device(at::kCUDA, 3);
  if (!holds(device, {static_cast<uint8_t>(at::kCUDA), 3}) ||
      !holds(std::optional<c10::Device>(device), {static_cast<uint8_t>(at::kCUDA), 3, 1}) ||
      !flag_at(std::optional<c10::Device>(), 2, 0))
    return "the layout of a device";
  const int64_t numbers[2] = {7, -7};
  const c10::IntArrayRef ints(numbers, 2);
  const uint64_t where = reinterpret_cast<uint64_t>(numbers);
  if (!holds_words(ints, {where, 2})) return "the layout of an integer list";
  c10::OptionalIntArrayRef some(ints), none;
  if (!holds_words(some, {where, 2}) || !flag_at(some, 16, 1) || !flag_at(none, 16, 0))
    return "the layout of an optional integer list";
  if (!holds_words(c10::SymInt(-7), {static_cast<uint64_t>(-7)})) return "the layout of a SymInt";
  std::optional<c10::SymInt> symbol(c10::SymInt(7)), no_symbol;
  if (!holds_words(symbol, {7}) || !flag_at(symbol, 8, 1) || !flag_at(no_symbol, 8, 0))
    return "the layout of an optional SymInt";
  const std::optional<c10::Scalar> scalar(c10::Scalar(int64_t(7)));
  if ((const void *)&*scalar != (const void *)&scalar) return "the layout of an optional number";
  const c10::Scalar whole(int64_t(-7)), fraction(1.5);
  if (!holds_words(value_of(whole), {static_cast<uint64_t>(-7)}) ||
      std::memcmp(&value_of(fraction), &expected, 8) != 0 || !flag_at(scalar, 32, 1) ||
      !flag_at(std::optional<c10::Scalar>(), 32, 0))
    return "the layout of a number";
  const c10::Scalar several[2] = {whole, fraction};
  if (!holds_words(c10::ArrayRef<c10::Scalar>(several, 2), {reinterpret_cast<uint64_t>(several), 2}) ||
      reinterpret_cast<uint64_t>(several + 1) - reinterpret_cast<uint64_t>(several) != 32)
    return "the layout of a list of numbers";
  if (!holds(std::array<bool, 4>{true, false, false, true}, {1, 0, 0, 1})) return "the layout of an array of bools";
  std::optional<at::Generator> no_generator;
  if (!flag_at(no_generator, 8, 0)) return "the layout of an optional generator";
  const std::string_view text("abc");
  if (!holds_words(text, {3, reinterpret_cast<uint64_t>(text.data())})) return "the layout of a string view";
  return nullptr;
}

} // namespace

const char *abi_problem() {
  static const char *problem = find_problem();
  return problem;
}

int abi_tensor_list_tag() { return static_cast<int>(c10::IListRefTag::Unboxed); }

PyObject *abi_enum_number(PyObject *value) {
  if (THPDtype_Check(value)) return PyLong_FromLong(static_cast<int>(((THPDtype *)value)->scalar_type));
  if (THPLayout_Check(value)) return PyLong_FromLong(static_cast<int>(((THPLayout *)value)->layout));
  if (THPMemoryFormat_Check(value))
    return PyLong_FromLong(static_cast<int>(((THPMemoryFormat *)value)->memory_format));
  if (THPDevice_Check(value)) {
    const c10::Device device = ((THPDevice *)value)->device;
    return PyLong_FromLong(static_cast<uint8_t>(device.type()) | static_cast<uint8_t>(device.index()) << 8);
  }
  PyErr_SetString(PyExc_TypeError, "no dtype, layout, memory format or device");
  return nullptr;
}

PyObject *abi_scalar_bytes(PyObject *number, bool optional) {
  try {
    if (number == Py_None && optional) {
      std::optional<c10::Scalar> none;
      std::string bytes(sizeof(none), '\0');
      return PyBytes_FromStringAndSize(bytes.data(), bytes.size());
    }
    const c10::Scalar scalar = torch::jit::toIValue(number, c10::NumberType::get()).toScalar();
    if (scalar.isSymbolic()) {
      PyErr_SetString(PyExc_TypeError, "a symbolic number is no constant");
      return nullptr;
    }
    if (!optional) return PyBytes_FromStringAndSize(reinterpret_cast<const char *>(&scalar), sizeof(scalar));
    const std::optional<c10::Scalar> some(scalar);
    return PyBytes_FromStringAndSize(reinterpret_cast<const char *>(&some), sizeof(some));
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

} // namespace trident
