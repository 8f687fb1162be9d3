/* What a failed guard looked at, copied so that it can be told in words later.
 *
 * Made at a miss. A snapshot keeps no object of the user's alive and is of bounded size; making one runs
 * no code of the user's. Its form, for Python (trident/guard_report.py):
 *
 *   ("value", v)                       v is None, or a short int, float, bool, complex, str or bytes, a
 *                                      torch.dtype or a torch.device
 *   ("type", name)                     a class
 *   ("object", type's name, length)    length -1: not a builtin container
 *   ("tensor", type's name, id of the type, dtype, device, requires_grad, sizes, strides); the last four are
 *                                      None for tensors that answer in Python
 *   ("text", text)                     of a check of the surroundings
 *   ("locals", {name: snapshot})       of a check of all locals
 */
#ifndef TRIDENT_SNAPSHOT_H
#define TRIDENT_SNAPSHOT_H

#include "guards.h"

namespace trident {

/* New reference, or null if there is nothing to tell; leaves no Python error. `looked_at` may be null. */
PyObject *snapshot(const GuardProgram &program, int row, PyObject *looked_at, PyObject *const *locals);

} // namespace trident
#endif
