#include "shape_guards.h"

#include <alloca.h>
#include <cmath>
#include <cstring>
#include <memory>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

namespace trident {

namespace {

/* Inputs and constants, then operations of one and of two values, then those that decide. */
#define TRIDENT_SHAPE_STEPS(X)                                                                      \
  X(object) X(size) X(stride) X(storage_offset) X(integer) X(real)                                  \
  X(negative) X(absolute) X(to_real) X(square_root) X(floor) X(ceiling) X(truncate)       \
  X(round) X(is_nan) X(negation)                                                                    \
  X(add) X(subtract) X(multiply) X(divide) X(floor_divide) X(modulo) X(power) X(bit_and) X(bit_or)  \
  X(bit_xor) X(shift_left) X(shift_right) X(minimum) X(maximum) X(less) X(less_equal) X(equal)      \
  X(not_equal) X(both) X(either) X(same)                                                            \
  X(require)

enum class Kind : uint8_t {
#define X(name) name,
  TRIDENT_SHAPE_STEPS(X)
#undef X
};

const char *const kStepNames[] = {
#define X(name) #name,
    TRIDENT_SHAPE_STEPS(X)
#undef X
    nullptr};

constexpr size_t kMaxSteps = 2048;         /* values are on the C stack, 16 bytes each */
constexpr int64_t kExact = int64_t(1) << 53; /* doubles hold all integers up to here */

/* A Python int of 64 bits, a bool (0 or 1), or a float. */
struct Value {
  union {
    int64_t i;
    double d;
  };
  bool real;

  static Value of(int64_t i) { Value v; v.i = i; v.real = false; return v; }
  static Value of(double d) { Value v; v.d = d; v.real = true; return v; }
  double as_double() const { return real ? d : static_cast<double>(i); } /* rounds as Python does */
  bool truth() const { return real ? d != 0 : i != 0; }
};

struct Step {
  Kind kind;
  int32_t a, b; /* values; of inputs an operand and a dimension; of `same` two operands */
  Value constant;
};

const char *const kMethodNames[] = {"size", "stride", "storage_offset"};

struct Name {
  PyObject *dict, *key, *value; /* no value: `dict` must not have the key */
};

/* A call of a method of the tensor in that operand. */
struct MethodUse {
  int32_t operand;
  int method;
};

} // namespace

struct ShapeProgram {
  PyObject *function;
  std::vector<int32_t> registers;
  std::vector<Step> steps;
  std::vector<Name> names;
  std::vector<MethodUse> methods;
};

namespace {

/* Interned names and the plain methods of torch's own tensors; found once. */
PyObject *method_names_[3], *methods_[3];

bool find_methods() {
  for (int i = 0; i < 3; i++) {
    if (methods_[i] != nullptr) continue;
    if (method_names_[i] == nullptr) method_names_[i] = PyUnicode_InternFromString(kMethodNames[i]);
    if (method_names_[i] == nullptr) return false;
    PyObject *method = PyObject_GetAttr(THPVariableClass, method_names_[i]);
    if (method == nullptr) return false;
    if (!Py_IS_TYPE(method, &PyMethodDescr_Type) ||
        std::strcmp(((PyMethodDescrObject *)method)->d_common.d_type->tp_name, "torch._C.TensorBase") != 0) {
      Py_DECREF(method);
      PyErr_Format(PyExc_TypeError, "check_shapes: torch.Tensor.%s is not torch's own", kMethodNames[i]);
      return false;
    }
    methods_[i] = method;
  }
  return true;
}

/* Is `o` a tensor whose sizes are plain numbers? Some of them may still be symbolic: that throws. */
bool is_plain_tensor(PyObject *o) {
  if (!THPVariable_CheckExact(o) && !THPVariable_Check(o)) return false;
  const at::Tensor &t = THPVariable_Unpack(o);
  return t.defined() && t.layout() == c10::kStrided && !t.key_set().has(c10::DispatchKey::Python);
}

bool names_hold(const ShapeProgram &program) {
  for (const Name &name : program.names) {
    PyObject *value = PyDict_GetItemWithError(name.dict, name.key);
    if (value != name.value) {
      PyErr_Clear();
      return false;
    }
  }
  return true;
}

bool methods_hold(const ShapeProgram &program, PyObject *const *registers) {
  int32_t checked = -1;
  for (const MethodUse &use : program.methods) {
    PyObject *o = registers[program.registers[use.operand]];
    if (use.operand != checked && !is_plain_tensor(o)) return false;
    checked = use.operand;
    if (!method_is(o, method_names_[use.method], methods_[use.method])) return false;
  }
  return true;
}

bool number_of(PyObject *o, Value *out) {
  if (PyLong_CheckExact(o) || PyBool_Check(o)) {
    int overflow = 0;
    *out = Value::of(static_cast<int64_t>(PyLong_AsLongLongAndOverflow(o, &overflow)));
    return overflow == 0;
  }
  if (!PyFloat_CheckExact(o)) return false;
  *out = Value::of(PyFloat_AS_DOUBLE(o));
  return true;
}

/* An integral double as an int. */
bool int_of(double d, Value *out) {
  if (!(d >= -9223372036854775808.0 && d < 9223372036854775808.0)) return false; /* nor nan */
  *out = Value::of(static_cast<int64_t>(d));
  return true;
}

/* -1, 0, 1, or 2 if they are unordered. Python compares an int with a float exactly. */
bool compare(const Value &a, const Value &b, int *out) {
  if (!a.real && !b.real) {
    *out = a.i < b.i ? -1 : a.i > b.i;
    return true;
  }
  for (const Value *v : {&a, &b})
    if (!v->real && (v->i > kExact || v->i < -kExact)) return false;
  double x = a.as_double(), y = b.as_double();
  *out = x < y ? -1 : x > y ? 1 : x == y ? 0 : 2;
  return true;
}

/* CPython's float_rem, and float_floor_div below. */
double float_modulo(double x, double y) {
  double mod = std::fmod(x, y);
  if (mod == 0) return std::copysign(0.0, y);
  return (y < 0) != (mod < 0) ? mod + y : mod;
}

double float_floor_divide(double x, double y) {
  double mod = std::fmod(x, y), quotient = (x - mod) / y;
  if (mod != 0 && (y < 0) != (mod < 0)) quotient -= 1.0;
  if (quotient == 0) return std::copysign(0.0, x / y);
  double floored = std::floor(quotient);
  return quotient - floored > 0.5 ? floored + 1.0 : floored;
}

double round_half_even(double x) { /* float.__round__ without digits */
  double rounded = std::round(x);
  return std::fabs(x - rounded) == 0.5 ? 2.0 * std::round(x / 2.0) : rounded;
}

bool divide(const Value &a, const Value &b, Kind kind, Value *out) {
  if (!b.truth()) return false; /* ZeroDivisionError */
  if (a.real || b.real) {
    double x = a.as_double(), y = b.as_double();
    *out = Value::of(kind == Kind::divide         ? x / y
                     : kind == Kind::floor_divide ? float_floor_divide(x, y)
                                                  : float_modulo(x, y));
    return true;
  }
  if (kind == Kind::divide) { /* Python rounds the exact quotient once */
    for (int64_t i : {a.i, b.i})
      if (i > kExact || i < -kExact) return false;
    *out = Value::of(a.as_double() / b.as_double());
    return true;
  }
  if (b.i == -1) { /* INT64_MIN / -1 does not fit, and traps */
    *out = Value::of(int64_t(0));
    return kind == Kind::modulo || !__builtin_sub_overflow(int64_t(0), a.i, &out->i);
  }
  int64_t quotient = a.i / b.i, rest = a.i % b.i;
  bool down = rest != 0 && (rest < 0) != (b.i < 0);
  *out = Value::of(kind == Kind::floor_divide ? quotient - down : rest + (down ? b.i : 0));
  return true;
}

bool integer_power(int64_t base, int64_t exponent, Value *out) {
  int64_t result = 1;
  if (exponent < 0) return false; /* a float */
  while (true) {
    if ((exponent & 1) && __builtin_mul_overflow(result, base, &result)) return false;
    exponent >>= 1;
    if (exponent == 0) break;
    if (__builtin_mul_overflow(base, base, &base)) return false;
  }
  *out = Value::of(result);
  return true;
}

bool power(const Value &a, const Value &b, Value *out) {
  if (!a.real && !b.real) return integer_power(a.i, b.i, out);
  double x = a.as_double(), y = b.as_double();
  if (!(x > 0) || !std::isfinite(x) || !std::isfinite(y)) return false; /* Python has special cases */
  double result = std::pow(x, y);
  *out = Value::of(result);
  return std::isnormal(result); /* else Python may raise */
}

bool bits(const Value &a, const Value &b, Kind kind, Value *out) {
  if (a.real || b.real) return false;
  switch (kind) {
  case Kind::bit_and: *out = Value::of(a.i & b.i); return true;
  case Kind::bit_or: *out = Value::of(a.i | b.i); return true;
  case Kind::bit_xor: *out = Value::of(a.i ^ b.i); return true;
  default: break;
  }
  if (b.i < 0) return false; /* ValueError */
  if (kind == Kind::shift_right) {
    *out = Value::of(a.i >> (b.i > 63 ? 63 : b.i));
    return true;
  }
  if (b.i > 62) return false;
  *out = Value::of(int64_t(0));
  return !__builtin_mul_overflow(a.i, int64_t(1) << b.i, &out->i);
}

bool arithmetic(const Value &a, const Value &b, Kind kind, Value *out) {
  if (a.real || b.real) {
    double x = a.as_double(), y = b.as_double();
    *out = Value::of(kind == Kind::add ? x + y : kind == Kind::subtract ? x - y : x * y);
    return true;
  }
  *out = Value::of(int64_t(0));
  return !(kind == Kind::add        ? __builtin_add_overflow(a.i, b.i, &out->i)
           : kind == Kind::subtract ? __builtin_sub_overflow(a.i, b.i, &out->i)
                                    : __builtin_mul_overflow(a.i, b.i, &out->i));
}

bool unary(const Value &a, Kind kind, Value *out) {
  switch (kind) {
  case Kind::negation: *out = Value::of(int64_t(!a.truth())); return true;
  case Kind::is_nan: *out = Value::of(int64_t(a.real && std::isnan(a.d))); return true;
  case Kind::to_real: *out = Value::of(a.as_double()); return true;
  case Kind::square_root:
    *out = Value::of(std::sqrt(a.as_double()));
    return !(a.as_double() < 0); /* ValueError */
  default: break;
  }
  if (a.real) {
    switch (kind) {
    case Kind::negative: *out = Value::of(-a.d); return true;
    case Kind::absolute: *out = Value::of(std::fabs(a.d)); return true;
    case Kind::floor: return int_of(std::floor(a.d), out);
    case Kind::ceiling: return int_of(std::ceil(a.d), out);
    case Kind::truncate: return int_of(std::trunc(a.d), out);
    default: return int_of(round_half_even(a.d), out);
    }
  }
  *out = a; /* an int is its own floor */
  if (kind == Kind::negative || (kind == Kind::absolute && a.i < 0))
    return !__builtin_sub_overflow(int64_t(0), a.i, &out->i);
  return true;
}

bool comparison(const Value &a, const Value &b, Kind kind, Value *out) {
  int order;
  if (!compare(a, b, &order)) return false;
  switch (kind) { /* of equal values Python's min and max keep the first */
  case Kind::minimum: *out = order == 1 ? b : a; return true;
  case Kind::maximum: *out = order < 0 ? b : a; return true;
  case Kind::less: *out = Value::of(int64_t(order == -1)); return true;
  case Kind::less_equal: *out = Value::of(int64_t(order == -1 || order == 0)); return true;
  case Kind::equal: *out = Value::of(int64_t(order == 0)); return true;
  default: *out = Value::of(int64_t(order != 0)); return true;
  }
}

bool property(const at::Tensor &t, const Step &step, Value *out) {
  if (step.kind == Kind::storage_offset) {
    *out = Value::of(t.storage_offset());
    return true;
  }
  at::IntArrayRef dims = step.kind == Kind::size ? t.sizes() : t.strides();
  if (static_cast<size_t>(step.b) >= dims.size()) return false; /* IndexError */
  *out = Value::of(dims[step.b]);
  return true;
}

bool compute(const Value *values, const Step &step, Value *out) {
  const Value &a = values[step.a], &b = values[step.b];
  switch (step.kind) {
  case Kind::add: case Kind::subtract: case Kind::multiply: return arithmetic(a, b, step.kind, out);
  case Kind::divide: case Kind::floor_divide: case Kind::modulo: return divide(a, b, step.kind, out);
  case Kind::power: return power(a, b, out);
  case Kind::bit_and: case Kind::bit_or: case Kind::bit_xor: case Kind::shift_left:
  case Kind::shift_right:
    return bits(a, b, step.kind, out);
  case Kind::minimum: case Kind::maximum: case Kind::less: case Kind::less_equal: case Kind::equal:
  case Kind::not_equal:
    return comparison(a, b, step.kind, out);
  case Kind::both: *out = Value::of(int64_t(a.truth() && b.truth())); return true;
  case Kind::either: *out = Value::of(int64_t(a.truth() || b.truth())); return true;
  default: return unary(a, step.kind, out);
  }
}

Verdict evaluate(const ShapeProgram &program, PyObject *const *registers) {
  if (!names_hold(program) || !methods_hold(program, registers)) return Verdict::undecided;
  auto *values = static_cast<Value *>(alloca((program.steps.size() + 1) * sizeof(Value)));
  auto operand = [&](int32_t i) { return registers[program.registers[i]]; };
  Value *out = values;
  for (const Step &step : program.steps) {
    bool known = true;
    switch (step.kind) {
    case Kind::object: known = number_of(operand(step.a), out); break;
    case Kind::size: case Kind::stride: case Kind::storage_offset:
      known = property(THPVariable_Unpack(operand(step.a)), step, out);
      break;
    case Kind::integer: case Kind::real: *out = step.constant; break;
    case Kind::less: case Kind::less_equal: case Kind::equal: case Kind::not_equal: {
      const Value &a = values[step.a], &b = values[step.b];
      if (a.real || b.real) known = comparison(a, b, step.kind, out);
      else
        *out = Value::of(int64_t(step.kind == Kind::less         ? a.i < b.i
                                 : step.kind == Kind::less_equal ? a.i <= b.i
                                                                 : (a.i == b.i) == (step.kind == Kind::equal)));
      break;
    }
    case Kind::same: *out = Value::of(int64_t(operand(step.a) == operand(step.b))); break;
    case Kind::require:
      if (!values[step.a].truth()) return Verdict::no;
      break;
    default: known = compute(values, step, out); break;
    }
    if (!known) return Verdict::undecided;
    out++;
  }
  return Verdict::yes;
}

bool malformed(const char *what) {
  if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "check_shapes: malformed %s", what);
  return false;
}

bool is_input(Kind kind) { return kind <= Kind::storage_offset; }
bool has_second(Kind kind) { return kind >= Kind::add && kind < Kind::require; }

/* Operands are those of inputs and of `same`; others are values of earlier steps. */
bool decode_operands(Step *step, PyObject *first, PyObject *second, const ShapeProgram &program) {
  long a = PyLong_AsLong(first), b = PyLong_AsLong(second);
  if ((a == -1 || b == -1) && PyErr_Occurred()) return false;
  bool operands = is_input(step->kind) || step->kind == Kind::same;
  long limit = static_cast<long>(operands ? program.registers.size() : program.steps.size());
  long limit_b = step->kind == Kind::size || step->kind == Kind::stride ? 1 << 16
                 : has_second(step->kind)                               ? limit
                                                                        : 1;
  if (a < 0 || a >= limit || b < 0 || b >= limit_b) return malformed("operand");
  step->a = static_cast<int32_t>(a);
  step->b = static_cast<int32_t>(b);
  return true;
}

bool decode_step(PyObject *tuple, ShapeProgram *program) {
  const char *name;
  PyObject *first, *second;
  if (!PyArg_ParseTuple(tuple, "sOO", &name, &first, &second)) return false;
  int index = 0;
  while (kStepNames[index] != nullptr && std::strcmp(kStepNames[index], name) != 0) index++;
  if (kStepNames[index] == nullptr) {
    PyErr_Format(PyExc_ValueError, "check_shapes: unknown step '%s'", name);
    return false;
  }
  Step step{static_cast<Kind>(index), 0, 0, Value::of(int64_t(0))};
  if (step.kind == Kind::integer || step.kind == Kind::real) {
    bool fits = step.kind == Kind::real ? PyFloat_CheckExact(first) : PyLong_CheckExact(first);
    if (!fits || !number_of(first, &step.constant)) return malformed("constant");
  } else if (!decode_operands(&step, first, second, *program)) {
    return false;
  }
  if (is_input(step.kind) && step.kind != Kind::object) {
    int method = static_cast<int>(step.kind) - static_cast<int>(Kind::size);
    bool seen = false;
    for (const MethodUse &use : program->methods) seen |= use.operand == step.a && use.method == method;
    if (!seen) program->methods.push_back({step.a, method});
  }
  program->steps.push_back(step);
  return true;
}

bool decode_names(PyObject *names, ShapeProgram *program) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); i++) {
    Name name;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(names, i), "O!O!O", &PyDict_Type, &name.dict,
                          &PyUnicode_Type, &name.key, &name.value))
      return false;
    if (name.value == Py_None) name.value = nullptr;
    program->names.push_back(name);
  }
  return true;
}

bool decode(PyObject *object, int n_registers, ShapeProgram *program) {
  PyObject *registers, *steps, *names;
  if (object == nullptr || !PyTuple_Check(object)) return malformed("program");
  if (!PyArg_ParseTuple(object, "OO!O!O!", &program->function, &PyTuple_Type, &registers,
                        &PyTuple_Type, &steps, &PyTuple_Type, &names))
    return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(registers); i++) {
    long r = PyLong_AsLong(PyTuple_GET_ITEM(registers, i));
    if (r < 0 || r >= n_registers) return malformed("register");
    program->registers.push_back(static_cast<int32_t>(r));
  }
  if (static_cast<size_t>(PyTuple_GET_SIZE(steps)) > kMaxSteps) return malformed("number of steps");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps); i++)
    if (!decode_step(PyTuple_GET_ITEM(steps, i), program)) return false;
  return decode_names(names, program) && find_methods();
}

} // namespace

ShapeProgram *new_shape_program(PyObject *object, int n_registers) {
  auto program = std::make_unique<ShapeProgram>();
  return decode(object, n_registers, program.get()) ? program.release() : nullptr;
}

void delete_shape_program(ShapeProgram *program) { delete program; }

const std::vector<int32_t> &shape_registers(const ShapeProgram &program) { return program.registers; }
PyObject *shape_function(const ShapeProgram &program) { return program.function; }

Verdict shapes_hold(const ShapeProgram &program, PyObject *const *registers) {
  try {
    return evaluate(program, registers);
  } catch (...) { /* symbolic sizes, tensors without strides */
    return Verdict::undecided;
  }
}

const char *const *shape_step_names() { return kStepNames; }

} // namespace trident
