/* Shape guards: conditions on sizes, strides and numbers, computed on 64-bit integers and doubles.
 *
 * Dynamo checks them with one Python function; `shapes_hold` computes what that function computes.
 * Whatever could differ from Python (an int beyond 64 bits, a subclass of int, a tensor whose sizes are
 * Python's business, an operation that raises) is `undecided`: then the function itself is called.
 *
 * Ownership: a program borrows what it names from the tuple that it was made of, which the row owns.
 */
#ifndef TRIDENT_SHAPE_GUARDS_H
#define TRIDENT_SHAPE_GUARDS_H

#include "cpython_frame.h"

#include <vector>

namespace trident {

enum class Verdict : uint8_t { no, yes, undecided };

struct ShapeProgram;

/* `object` is (function, registers, steps, names): steps are (name, first, second), names are (dict,
 * key, value or None), what the function's own names have to mean. Null with a Python error set. */
ShapeProgram *new_shape_program(PyObject *object, int n_registers);
void delete_shape_program(ShapeProgram *program);

const std::vector<int32_t> &shape_registers(const ShapeProgram &program);
PyObject *shape_function(const ShapeProgram &program); /* borrowed */

/* Runs no Python and leaves no error set. */
Verdict shapes_hold(const ShapeProgram &program, PyObject *const *registers);

const char *const *shape_step_names(); /* null-terminated */

} // namespace trident
#endif
