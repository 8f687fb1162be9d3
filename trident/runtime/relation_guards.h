/* Guards over several values that Dynamo decides with a function of its own: which tensors share
 * memory, and shape guards in C++. The functions are Dynamo's (its kinds of guard differ between
 * releases in what they compute), the state that its guards keep between their members is not needed.
 *
 * Ownership: a relation borrows what it names from the tuple that it was made of, which the row owns.
 */
#ifndef TRIDENT_RELATION_GUARDS_H
#define TRIDENT_RELATION_GUARDS_H

#include "cpython_frame.h"

#include <vector>

namespace trident {

struct Relation {
  std::vector<int32_t> registers;
  PyObject *object; /* a function, or what keeps a C function loaded */
};

/* `tuple` is (registers, object). Null with a Python error set. */
Relation *new_relation(PyObject *tuple, int n_registers);

/* Do exactly the first `n` tensors share memory with any of the others? May call Python. */
bool storages_overlap(const Relation &relation, int64_t n, PyObject *const *registers);

/* The C function at `address` over the first `n_int` values as integers and the others as floats. */
bool symbolic_shapes_hold(const Relation &relation, int64_t address, int64_t n_int,
                          PyObject *const *registers);

} // namespace trident
#endif
