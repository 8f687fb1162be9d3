# cython: language_level=3, binding=True, embedsignature=True
"""Native side of Trident: the eval-frame hook, the doors, the guard programs and the SCM entry.

This module only wraps the C++ runtime (trident/runtime); see frame.h there for how calls arrive and
for who owns what. Everything needs the GIL, which makes every function here atomic.
"""

from cpython.exc cimport PyErr_Occurred
from cpython.ref cimport Py_DECREF, Py_INCREF, Py_XINCREF
from libc.stdint cimport uintptr_t

import functools
import weakref


cdef int _propagate() except -1:
    """The C++ runtime has set a Python error: raise it."""
    if PyErr_Occurred() == NULL:
        raise SystemError("trident's runtime reported an error without setting one")
    return -1


cdef inline PyObject *_unbound_or(value):
    if value is NotImplemented:
        return NULL
    return <PyObject *>value


ACTIONS = ("default", "skip", "run_only")


def op_names() -> tuple:
    """The guard operations that the runtime knows, in the order of its enumeration."""
    cdef const char *const *name = guard_op_names()
    names = []
    while name[0] != NULL:
        names.append(name[0].decode())
        name += 1
    return tuple(names)


cdef class NativeProgram:
    """A host program: operator calls by index, and the JIT'd function that makes them in order.

    `globals_` and `file` are those of the user's function, for the warnings that operators give.
    """

    cdef HostProgram *native
    cdef readonly object code
    cdef object _globals
    cdef object _file
    cdef list _kept

    def __cinit__(self, int n_inputs, int n_slots, dict globals_ not None, str file not None):
        if n_inputs < 0 or n_slots < n_inputs:
            raise ValueError(f"{n_inputs} inputs among {n_slots} slots")
        self.native = new HostProgram()
        self.native.n_inputs = n_inputs
        self.native.n_slots = n_slots
        self._globals = globals_
        self._file = file
        self._kept = []
        self.native.kept = <PyObject *>self._kept
        self.native.globals = <PyObject *>globals_
        self.native.globals_file = <PyObject *>file

    def __dealloc__(self):
        del self.native

    @property
    def address(self) -> int:
        """The HostProgram, for plans that run it."""
        return <uintptr_t>self.native

    def add_constant(self, int slot, value, dtype=None) -> None:
        """The slot holds this tensor, or the tensor that eager makes of this number, from the start,
        the latter converted to `dtype`; raises TypeError for a subclass of Tensor and anything else."""
        if not program_add_constant(self.native, slot, <PyObject *>value, <PyObject *>dtype):
            _propagate()

    def add_integer(self, str op, int64_t a, int64_t b) -> None:
        """Appends a row of the integers that are computed first: see IntegerRow in program.h. Raises
        ValueError for what is none."""
        if not program_add_integer(self.native, op.encode(), a, b):
            _propagate()

    def add_number(self, int slot, int row) -> None:
        """The slot holds the tensor that eager makes of that integer."""
        if not 0 <= slot < self.native.n_slots or not 0 <= row < <int>self.native.integers.size():
            raise ValueError(f"slot {slot}, row {row}")
        self.native.numbers.push_back(pair[int, int](slot, row))

    def add_list(self, list slots) -> None:
        """Appends a list of optional tensors: slots, -1 for None."""
        if not all(-1 <= slot < self.native.n_slots for slot in slots):
            raise ValueError(f"slots {slots} of {self.native.n_slots}")
        self.native.lists.push_back(<vector[int]>slots)

    def add_call(self, str name, str overload, list arguments, list results) -> int:
        """Appends a call of an operator and returns its index. `arguments`: (kind, value) for each of
        the schema's, kind "constant", "default", "tensor" (a slot), "tensors" or "optional_tensors"
        (lists of slots or None), "computed" ((is it a list, its items: (is it a row of the program's
        integers, the row or the number))); `results`: for each return a slot, None, or a list of these."""
        cdef bytes first = name.encode(), second = overload.encode()
        cdef int index = program_add_call(self.native, first, second, <PyObject *>arguments,
                                          <PyObject *>results)
        if index < 0:
            _propagate()
        return index

    def add_layout(self, list numbers, list computed, int dtype) -> None:
        """Appends a layout: sizes, as many strides, perhaps an offset; `computed`: (position, row) for
        those that are integers of the program; `dtype`: its number, for a tensor that is allocated."""
        if not program_add_layout(self.native, numbers, computed, dtype):
            _propagate()

    def add_check(self, int layout, int64_t alignment, function, name) -> None:
        """Appends a check: of a layout, or (-1) that an address is a multiple of `alignment`. Where it
        fails, `function` is called with the tensor, what it is to be, and `name` unless it is None."""
        cdef PyObject *text = NULL
        if name is not None:
            text = <PyObject *>name
        self._kept += [function, name]
        if not program_add_check(self.native, layout, alignment, <PyObject *>function, text):
            _propagate()

    def add_launch(self, list arguments not None, python not None, autotuner, tuple variant) -> None:
        """Appends a launch of a Triton kernel. `arguments`: (kind "tensor", "integer" or "real", the
        slot or row, is its value part of what the variants differ in). `python` is called with their
        values and the program's integers: it launches, and returns a variant (as in launch.h) for
        calls like this one, or None. `autotuner`: whose `best_config` a launch sets. `variant`: the
        only one, which fits all calls, or None. Raises ValueError for what is none."""
        cdef PyObject *only = NULL
        cdef PyObject *tuner = NULL
        if variant is not None:
            only = <PyObject *>variant
        if autotuner is not None:
            tuner = <PyObject *>autotuner
        self._kept += [python, autotuner, variant]
        if not program_add_launch(self.native, <PyObject *>arguments, <PyObject *>python, tuner, only):
            _propagate()

    def add_fact(self, container not None, key, value) -> None:
        """Stock runs the frame unless the dict `container` has `value` under `key` (NotImplemented:
        has no such key); or the list has it at the place `key` (NotImplemented: is no longer); or, where
        `key` is None, the list is empty, or the dict has `value` items (None: no fewer than it had)."""
        cdef PyObject *name = NULL
        if not isinstance(container, (dict, list)):
            raise TypeError(f"a fact about a {type(container).__name__}")
        if key is not None:
            name = <PyObject *>key
        if key is None and value is None:
            value = NotImplemented
        if not program_add_fact(self.native, <PyObject *>container, name, _unbound_or(value)):
            _propagate()

    def set_launches(self, uintptr_t cuda_allocator, allocator_variable, allocator) -> None:
        """Where at::cuda::getCUDADeviceAllocator is, and what stock puts into Triton's context
        variable (None: nothing)."""
        self._kept += [allocator_variable, allocator]
        self.native.cuda_allocator = cuda_allocator
        if allocator is not None:
            self.native.allocator_variable = <PyObject *>allocator_variable
            self.native.allocator = <PyObject *>allocator

    def set_inference(self, cbool without_autocast, list mutated, epilogue, list epilogue_inputs,
                      int n_results, cbool keeps_gil, list aligned) -> None:
        """The graph is one that AOTAutograd compiled for inference: it runs with gradients off,
        advances the versions of the inputs `mutated` first, and what it returns is what `epilogue`
        (unless None), called with these inputs and the outputs, makes of them: `n_results` objects.
        `keeps_gil`: it takes too little time for another thread to use it. `aligned`: inputs of which
        stock makes aligned copies, which it is left to do. After `finish`."""
        for position in (*mutated, *epilogue_inputs, *aligned):
            if not 0 <= position < self.native.n_inputs:
                raise ValueError(f"input {position} of {self.native.n_inputs}")
        self._kept.append(epilogue)
        self.native.without_grad = True
        self.native.without_autocast = without_autocast
        self.native.keeps_gil = keeps_gil
        self.native.mutated = mutated
        self.native.aligned = aligned
        if epilogue is not None:
            self.native.epilogue_inputs = epilogue_inputs
            self.native.epilogue = <PyObject *>epilogue
            self.native.n_results = n_results

    def finish(self, list outputs, list lines, cudnn=None) -> None:
        """Sets the outputs, ("tensor", slot), ("integer", row) or ("none", 0), and, per step, (file,
        function, line; 0 for none, "bindings", "ops" or "kernel"). `cudnn`: the program is for calls
        while torch.backends.cudnn.enabled is this."""
        cdef ProgramOutput output
        cdef Caller caller
        self.native.cudnn = -1 if cudnn is None else int(cudnn)
        for kind, place in outputs:
            is_integer = kind == "integer"
            if not 0 <= place < (self.native.integers.size() if is_integer else self.native.n_slots):
                raise ValueError(f"output {kind} {place}")
            output = (ProgramOutput.integer if is_integer
                      else ProgramOutput.tensor if kind == "tensor" else ProgramOutput.none)
            self.native.outputs.push_back(pair[ProgramOutput, int](output, place))
        self.native.n_results = <int>self.native.outputs.size()
        for file, function, line, name in lines:
            caller = (Caller.kernel if name == "kernel"
                      else Caller.ops if name == "ops" else Caller.bindings)
            program_add_line(self.native, file.encode(), function.encode(), line, caller)

    def set_function(self, uintptr_t address, code) -> None:
        """The JIT'd function; `code` lives as long as this object."""
        program_set_function(self.native, address)
        self.code = code


cdef class NativeGraph:
    """A host program as a function: of the graph's inputs, of which it takes those at the positions
    `inputs`; the graph's outputs are the program's at the positions `outputs`. Returns
    NotImplemented, and has done nothing, where stock is to run the graph."""

    cdef NativeProgram _program
    cdef tuple _inputs, _outputs

    def __init__(self, NativeProgram program not None, tuple inputs not None, tuple outputs not None):
        if len(outputs) != program.native.n_results:
            raise ValueError(f"{len(outputs)} outputs of {program.native.n_results}")
        self._program, self._inputs, self._outputs = program, inputs, outputs

    def __call__(self, *inputs):
        cdef vector[PyObject *] taken, made
        cdef int32_t status
        if not thread_allows_now() or program_is_observed():
            return NotImplemented
        for position in self._inputs:
            taken.push_back(<PyObject *>inputs[position])
        taken.push_back(NULL)
        made.resize(len(self._outputs) + 1)
        status = trident_program_run(self._program.native, taken.data(), made.data())
        if status == 2:
            return NotImplemented
        if status != 0:
            _propagate()
        values = [_take(made[i]) for i in range(len(self._outputs))]
        return tuple([values[position] for position in self._outputs])


cdef _take(PyObject *new_reference):
    value = <object>new_reference
    Py_DECREF(value)
    return value


def operator_abi():
    """(what of the C++ ABI is not as JIT'd code assumes, or None; the tag of a tensor list)."""
    cdef const char *problem = abi_problem()
    return (None if problem == NULL else problem.decode()), abi_tensor_list_tag()


def enum_number(value) -> int:
    """The number in C++ of a dtype, layout, memory format, or device (type, then index)."""
    return _own(abi_enum_number(<PyObject *>value))


cdef _own(PyObject *made):
    """A new reference as a Python object, or the error that NULL stands for."""
    if made == NULL:
        _propagate()
    result = <object>made
    Py_DECREF(result)
    return result


def scalar_bytes(number, cbool optional) -> bytes:
    """The bytes of a c10::Scalar, or of an optional one (`number` may be None then)."""
    return _own(abi_scalar_bytes(<PyObject *>number, optional))


def launch_on_cuda() -> None:
    """Launches go to CUDA's driver; raises RuntimeError where it is missing or too old."""
    cdef const char *problem = launch_use_cuda()
    if problem != NULL:
        raise RuntimeError(problem.decode())


def launch_through(uintptr_t address) -> None:
    """Launches of kernels on the CPU go to the C function at `address`, which has cuLaunchKernelEx's
    signature."""
    launch_use_function(address)


def program_function(str name) -> int:
    """The address of a function of runtime/program.h that JIT'd code calls; ValueError for others."""
    cdef bytes text = name.encode()
    cdef uintptr_t address = program_function_address(text)
    if address == 0:
        raise ValueError(f"the runtime has no function {name}")
    return address


cdef class NativeSpecialization:
    """One specialization: its guard program and what runs when they pass.

    Owns the guard program's payload, Dynamo's code object and the backend until `retire()` and the end
    of the last call that uses it.
    """

    cdef Specialization *native
    cdef readonly tuple framelocals

    def __cinit__(self, tuple framelocals not None):
        self.native = specialization_new()
        self.framelocals = framelocals

    def __dealloc__(self):
        specialization_unref(self.native)

    def set_guards(self, rows, int n_registers, tuple fetched=()) -> None:
        """Compiles rows (op, dst, src, a, b, obj, label), which hand the registers `fetched` over to
        the plan; raises ValueError or TypeError for a bad row."""
        cdef GuardProgram *program = new GuardProgram(n_registers, <PyObject *>self.framelocals)
        try:
            for op, dst, src, a, b, obj, label in rows:
                name = op.encode()
                if not program.add(name, dst, src, a, b, <PyObject *>obj, label):
                    _propagate()
        except BaseException:
            del program
            raise
        if self.native.guards != NULL:
            del program
            raise ValueError("the guards are set already")
        self.native.guards = program
        for register in fetched:
            if not 0 <= register < n_registers:
                raise ValueError(f"register {register} of {n_registers}")
        program.set_fetched(<vector[int]>fetched)

    def set_plan(self, uintptr_t address, handle, tuple plan_locals=()) -> None:
        """The native plan, a PlanFunction of scm.h, 0 for RUN_CODE;
        `handle` stays alive as long as the specialization. A call in which one of the frame locals
        numbered by `plan_locals` is unbound is left to stock."""
        for index in plan_locals:
            if not 0 <= index < len(self.framelocals):
                raise ValueError(f"frame local {index} of {len(self.framelocals)}")
            self.native.plan_locals.push_back(index)
        self.native.plan = <PlanFunction>address
        Py_INCREF(handle)
        self.native.handle = <PyObject *>handle

    def set_scope(self, dict globals_ not None, cbool has_program, cbool may_call) -> None:
        """The plan is for functions with these globals (which the handle keeps alive). `has_program`:
        it runs a host program; `may_call`: and code of the user's, so only the hook runs it."""
        self.native.has_program = has_program
        self.native.may_call = may_call
        self.native.plan_globals = <PyObject *>globals_

    def set_program(self, NativeProgram program not None) -> None:
        """The host program of the frame's graph, to be timed; the handle of `set_plan` keeps it alive."""
        self.native.program = program.native

    def set_origin(self, code, backend, int64_t isolate_id, str annotation) -> None:
        """Dynamo's code object, backend and recompile scope (-1: the default one)."""
        Py_INCREF(code)
        Py_INCREF(backend)
        self.native.code = <PyCodeObject *><PyObject *>code
        self.native.backend = <PyObject *>backend
        self.native.isolate_id = isolate_id
        self.native.annotation = annotation.encode()

    def retire(self) -> None:
        """No call selects it any more; calls in flight finish."""
        self.native.alive = False

    def check(self, tuple values not None) -> bool:
        """Runs the guards on frame locals (`NotImplemented` = unbound); for tests and `explain`."""
        cdef vector[PyObject *] locals
        if self.native.guards == NULL:
            return True
        if len(values) != len(self.framelocals):
            raise ValueError(f"expected {len(self.framelocals)} frame locals, got {len(values)}")
        for value in values:
            locals.push_back(_unbound_or(value))
        locals.push_back(<PyObject *>NULL)
        return self.native.guards.run(locals.data(), &self.native.last_failed, NULL)

    def check_many(self, tuple values not None, int n) -> float:
        """Mean time of n guard runs in nanoseconds, measured natively; raises if they do not pass."""
        from time import perf_counter_ns
        cdef vector[PyObject *] locals
        cdef int i
        cdef cbool passed = True
        for value in values:
            locals.push_back(_unbound_or(value))
        locals.push_back(<PyObject *>NULL)
        start = perf_counter_ns()
        for i in range(n):
            passed = passed and self.native.guards.run(locals.data(), &self.native.last_failed, NULL)
        elapsed = perf_counter_ns() - start
        if not passed:
            raise ValueError("the guards do not pass for these values")
        return elapsed / n

    @property
    def hits(self) -> int:
        return self.native.hits

    @property
    def alive(self) -> bool:
        return self.native.alive

    @property
    def last_failed(self) -> int:
        """Row of the last failed check, -1 if none failed yet."""
        return self.native.last_failed

    @property
    def miss(self):
        """(number, row, snapshot) of the last miss of the frame that this specialization saw: its
        number in NativeScm.noted_misses, the row that failed (-1: the guards were not asked, or passed)
        and what it looked at (see snapshot.h; None: nothing to tell). None before the first."""
        if self.native.miss.number == 0:
            return None
        got = None if self.native.miss.got == NULL else <object>self.native.miss.got
        return self.native.miss.number, self.native.miss.row, got

    @property
    def samples(self) -> tuple:
        """(the clock at the last one in ns, [(guards, plan, host program) in ns, None for what the call
        had not]) of the sampled calls, at most 31."""
        cdef Timings *timings = self.native.timings.get()
        cdef Sample sample
        if timings == NULL:
            return 0, []
        found = []
        for i in range(min(timings.n, kKept)):
            sample = timings.samples[i]
            times = sample.guards_ns, sample.plan_ns, sample.program_ns
            found.append(tuple([None if ns < 0 else ns for ns in times]))
        return timings.last_ns, found

    @property
    def remembered(self) -> tuple:
        """The rows that the memo which was used last makes unnecessary: see memo.h."""
        cdef const Memo *memo = NULL
        if self.native.guards != NULL:
            memo = self.native.guards.memos().recent()
        if memo == NULL:
            return ()
        return tuple([i for i in range(memo.covered.size()) if memo.covered[i]])

    @property
    def size(self) -> int:
        return 0 if self.native.guards == NULL else self.native.guards.size()

    @property
    def memos(self) -> tuple:
        """(how many, bytes): see memo.h."""
        if self.native.guards == NULL:
            return 0, 0
        return self.native.guards.memos().size(), self.native.guards.memos().bytes()

    @property
    def runs(self) -> tuple:
        """How often all rows of the guards ran (if need be to the first that failed), and how often
        they passed by what an earlier run found."""
        if self.native.guards == NULL:
            return 0, 0
        return self.native.guards.full_runs(), self.native.guards.memos().hits()

    def use_memos(self, cbool use) -> None:
        """Whether a run may use what an earlier one found; for tests and measurements."""
        if self.native.guards != NULL:
            self.native.guards.use_memos(use)


cdef class NativeScm:
    """The native entry of one frame. `owner` (borrowed) has `build()`, called for stale modules."""

    cdef Scm *native
    cdef object __weakref__

    def __cinit__(self, code, owner):
        self.native = scm_new(<PyCodeObject *><PyObject *>code, <PyObject *>owner)

    def __dealloc__(self):
        scm_unref(self.native)

    def set_specializations(self, list specializations not None) -> None:
        """Swaps in a new list; calls in flight keep the old one."""
        cdef SpecializationList *items = specialization_list_new()
        cdef NativeSpecialization s
        for item in specializations:
            s = <NativeSpecialization?>item
            s.native.references += 1
            items.items.push_back(s.native)
        scm_set_list(self.native, items)

    def set_skipped(self, NativeSpecialization s) -> None:
        """The plan for a frame that Dynamo skips, or None."""
        cdef Specialization *former = self.native.skipped
        self.native.skipped = NULL
        specialization_unref(former)
        if s is not None:
            s.native.references += 1
            self.native.skipped = s.native

    def set_sees_functions(self) -> None:
        """Dynamo's own lookup for this frame must see every doored function as a plain one."""
        self.native.sees_functions = True

    def set_stale(self, cbool stale) -> None:
        """True: call `owner.build()` at the next call that the hook sees."""
        self.native.stale = stale

    @property
    def counters(self) -> tuple:
        """(hits, misses, raised, run_code)"""
        cdef Counters c = self.native.counters
        return c.hits, c.misses, c.raised, c.run_code

    def reset_counters(self) -> None:
        self.native.counters.hits = 0
        self.native.counters.misses = 0
        self.native.counters.raised = 0
        self.native.counters.run_code = 0

    @property
    def noted_misses(self) -> int:
        """Misses of which the specializations keep the reason."""
        return self.native.n_noted_misses

    @property
    def passes(self) -> int:
        """How many calls are still left to stock unseen, as too many missed over Dynamo's limit."""
        return self.native.passes

    def measure(self, uint64_t n) -> None:
        """The next n hits are timed; without, the first few are, and one in 1024."""
        scm_measure(self.native, n)

    def hook(self, code) -> None:
        """The hook looks at this code object's frames from now on (again, after a back-off)."""
        hook_add(<PyCodeObject *><PyObject *>code, self.native)

    def kill(self) -> None:
        """The code object or the owner is dying: no door may enter any more."""
        self.native.code = NULL
        self.native.owner = NULL
        self.set_specializations([])
        self.set_skipped(None)


def unhook(code) -> None:
    """The hook lets this code object's frames pass."""
    hook_remove(<PyCodeObject *><PyObject *>code)


def unhook_address(uintptr_t address, _reference=None) -> None:
    """As unhook(), for a code object that is dying; serves as a weak reference's callback."""
    hook_remove(<PyCodeObject *>address)


def is_hooked(code) -> bool:
    return hook_has(<PyCodeObject *><PyObject *>code)


def resolve_dynamo(set_eval_frame, get_eval_frame_callback, set_override):
    """Finds Dynamo's native interface; returns the name of what is missing, or None."""
    cdef const char *missing = resolve(<PyObject *>set_eval_frame, <PyObject *>get_eval_frame_callback,
                                       <PyObject *>set_override)
    return None if missing == NULL else missing.decode()


def find_dynamo_extra(code) -> bool:
    """Learns where Dynamo keeps its record, from a code object that has one."""
    return find_extra_index(<PyCodeObject *><PyObject *>code)


def dynamo_record(code):
    """Dynamo's (action, recursive action, simple) for a code object, or None."""
    cdef FrameRecord record
    if not frame_record(<PyCodeObject *><PyObject *>code, &record):
        return None
    return ACTIONS[<int>record.frame], ACTIONS[<int>record.recursive], bool(record.simple)


def initialize(*, wrapper_code, int target_cell, int callback_cell, find_door, strict_check,
               tuple hook_names, dict global_hooks, tuple global_hook_names,
               tuple module_codes, flags, backend_matcher,
               dict device_dict, forward_ad, set python_kernels, cbool knows_global_state) -> None:
    """Hands the runtime the Python objects that it reads or calls; once per process."""
    cdef Setup setup
    cdef PyObject *accepts_or_null
    setup.wrapper_code = <PyCodeObject *><PyObject *>wrapper_code
    setup.target_cell = target_cell
    setup.callback_cell = callback_cell
    setup.find_door = <PyObject *>find_door
    setup.strict_check = <PyObject *>strict_check
    setup.hook_names = <PyObject *>hook_names
    setup.global_hooks = <PyObject *>global_hooks
    setup.global_hook_names = <PyObject *>global_hook_names
    setup.module_codes = <PyObject *>module_codes
    for name in global_hook_names:
        hash(name)  # the runtime reads the cached hash
    set_up(setup)
    for flag_dict, name, expected, accepts in flags:
        accepts_or_null = NULL
        if accepts is not None:
            accepts_or_null = <PyObject *>accepts
        add_flag(<PyObject *>flag_dict, <PyObject *>name, <PyObject *>expected, accepts_or_null)
    set_backend_matcher(<PyObject *>backend_matcher)
    set_guard_modules(<PyObject *>device_dict, <PyObject *>forward_ad, knows_global_state)
    set_python_kernels(<PyObject *>python_kernels)


def callback_died(_reference=None) -> None:
    """A Dynamo callback whose backend was compared died: addresses may be reused."""
    callbacks_changed()


def strict(cbool on) -> None:
    """Re-check every hit with Dynamo's own guards."""
    set_strict(on)


def install() -> None:
    hook_install()


def uninstall() -> None:
    hook_uninstall()


def installed() -> bool:
    return hook_is_on()


def patch_modules(type optimized_module not None) -> None:
    module_doors_patch(<PyTypeObject *><PyObject *>optimized_module)


def unpatch_modules() -> None:
    module_doors_unpatch()


def open_door(callable_, wrapper, target, NativeScm scm not None, *, int64_t isolate_id=-1,
              cbool fullgraph=False, cbool is_module=False, checks=()) -> None:
    """Puts a door on a compiled callable; raises TypeError if it cannot have one.

    `checks` is one (type, own forward or None, may _compiled_call_impl be set?) per nn.Module whose
    __call__ the door skips, outermost first.
    The callable is not kept alive.
    """
    cdef Door *door = new Door()
    cdef ModuleCheck check
    cdef PyObject *forward_name
    cdef PyObject *found
    door.callable = <PyObject *>callable_
    door.wrapper = <PyObject *>wrapper
    door.target = <PyObject *>target
    door.method = PyMethod_GET_FUNCTION(<PyObject *>target) if PyMethod_Check(<PyObject *>target) else NULL
    door.isolate_id = isolate_id
    door.fullgraph = fullgraph
    door.is_module = is_module
    name = "forward"
    forward_name = <PyObject *>name
    for type_, forward, compiled_call_allowed in checks:
        check = ModuleCheck()
        check.compiled_call_allowed = compiled_call_allowed
        check.type = <PyTypeObject *><PyObject *>type_
        found = _PyType_Lookup(check.type, forward_name)  # assigns the version, too
        check.type_version = check.type.tp_version_tag
        check.function = NULL
        if found != NULL and PyFunction_Check(found):
            check.function = <PyFunctionObject *>found
        check.forward = NULL
        if forward is not None:
            check.forward = <PyObject *>forward
        door.checks.push_back(check)
    scm.native.references += 1
    door.scm = scm.native
    reference = _dying(callable_)
    Py_INCREF(reference)
    door.reference = <PyObject *>reference
    if not door_open(door):
        _propagate()


def close_door(callable_) -> None:
    door_close(<PyObject *>callable_)


def refuse_door(wrapper) -> None:
    """Do not offer a door for this compiled function again, until `clear_refusals()`."""
    reference = _dying(wrapper)
    Py_INCREF(reference)
    door_refuse(<PyObject *>wrapper, <PyObject *>reference)


def clear_refusals() -> None:
    door_refusals_clear()


def close_doors() -> None:
    """Restores every callable that has a door."""
    doors_close_all()


def _forget_door(uintptr_t address, _reference=None):
    door_forget(<PyObject *>address)


def _dying(callable_):
    """A weak reference that forgets the callable's door; its callback is C only, since Dynamo would
    look at a Python function that the garbage collector happens to call in a compiled region."""
    return weakref.ref(callable_, functools.partial(_forget_door, <uintptr_t><PyObject *>callable_))


def has_door(callable_) -> bool:
    return door_exists(<PyObject *>callable_)


def suspend_doors() -> None:
    doors_suspend()


def resume_doors() -> None:
    doors_resume()


def after_fork_in_child() -> None:
    """Ends what other threads of the parent had suspended."""
    doors_after_fork_in_child()


def n_doors() -> int:
    return doors_count()


def calling_thread_allows() -> bool:
    """False in a state in which Trident leaves every call to stock (tracing, modes, export, stances…)."""
    return thread_allows_now()
