# The C++ runtime as the extension sees it: every extern declaration, and nothing else.
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uintptr_t
from libcpp cimport bool as cbool
from libcpp.pair cimport pair
from libcpp.string cimport string
from libcpp.vector cimport vector

cdef extern from "runtime/cpython_frame.h":
    ctypedef struct PyCodeObject:
        pass
    ctypedef struct PyFunctionObject:
        pass
    ctypedef struct PyTypeObject:
        unsigned int tp_version_tag
    PyObject *_PyType_Lookup(PyTypeObject *type, PyObject *name)
    int PyFunction_Check(PyObject *o)
    int PyMethod_Check(PyObject *o)
    PyObject *PyMethod_GET_FUNCTION(PyObject *o)

cdef extern from "runtime/timing.h" namespace "trident":
    ctypedef struct Sample "trident::Timings::Sample":
        int64_t guards_ns, plan_ns, program_ns
    cdef cppclass Samples "std::array<trident::Timings::Sample, trident::Timings::kKept>":
        Sample &operator[](size_t)
    ctypedef struct Timings:
        Samples samples
        uint64_t n
        int64_t last_ns
    const size_t kKept "trident::Timings::kKept"

cdef extern from "runtime/memo.h" namespace "trident":
    cdef cppclass Memo:
        vector[cbool] covered
    cdef cppclass Memos:
        size_t size()
        size_t bytes()
        uint64_t hits()
        const Memo *recent()

cdef extern from "runtime/guards.h" namespace "trident":
    cdef cppclass Fetched:
        pass
    cdef cppclass GuardProgram:
        GuardProgram(int n_registers, PyObject *framelocals)
        cbool add(const char *op, int dst, int src, int64_t a, int64_t b, PyObject *object, int label)
        cbool run(PyObject **locals, int *failed, Fetched *fetched)
        void set_fetched(vector[int] registers)
        size_t size()
        const Memos &memos()
        uint64_t full_runs()
        void use_memos(cbool use)
    const char *const *guard_op_names()
    void set_guard_modules(PyObject *device_dict, PyObject *forward_ad, cbool knows_global_state)

cdef extern from "runtime/launch.h" namespace "trident":
    const char *launch_use_cuda()
    void launch_use_function(uintptr_t address)

cdef extern from "runtime/program.h" namespace "trident":
    cdef cppclass IntegerRow:
        pass
    cdef enum class Caller:
        bindings
        ops
        kernel
    cdef enum class ProgramOutput:
        tensor
        integer
        none
    cdef cppclass HostProgram:
        HostProgram()
        uintptr_t cuda_allocator
        PyObject *kept
        PyObject *allocator_variable
        PyObject *allocator
        int n_inputs
        int n_slots
        vector[IntegerRow] integers
        vector[pair[int, int]] numbers
        vector[pair[ProgramOutput, int]] outputs
        vector[vector[int]] lists
        int cudnn
        cbool without_grad
        cbool without_autocast
        cbool keeps_gil
        vector[int] mutated
        PyObject *epilogue
        vector[int] epilogue_inputs
        vector[int] aligned
        int n_results
        PyObject *globals
        PyObject *globals_file
    int program_add_call(HostProgram *program, const char *name, const char *overload,
                         PyObject *arguments, PyObject *results)
    cbool program_add_integer(HostProgram *program, const char *op, int64_t a, int64_t b)
    cbool program_add_constant(HostProgram *program, int slot, PyObject *value, PyObject *dtype)
    void program_add_line(HostProgram *program, const char *file, const char *function, int line,
                          Caller caller)
    cbool program_add_layout(HostProgram *program, vector[int64_t] numbers, vector[pair[int, int]] computed,
                             int dtype)
    cbool program_add_check(HostProgram *program, int layout, int64_t alignment, PyObject *function,
                            PyObject *name)
    cbool program_add_fact(HostProgram *program, PyObject *container, PyObject *key, PyObject *value)
    cbool program_add_launch(HostProgram *program, PyObject *arguments, PyObject *python, PyObject *autotuner,
                             PyObject *variant)
    void program_set_function(HostProgram *program, uintptr_t address)
    uintptr_t program_function_address(const char *name)
    void set_python_kernels(PyObject *kernels)
    int32_t trident_program_run(HostProgram *program, PyObject **inputs, PyObject **outputs)
    cbool program_is_observed()
    const char *abi_problem()
    int abi_tensor_list_tag()
    PyObject *abi_enum_number(PyObject *value)
    PyObject *abi_scalar_bytes(PyObject *number, cbool optional)

cdef extern from "runtime/scm.h" namespace "trident":
    ctypedef int32_t (*PlanFunction)(PyObject **locals, PyObject **result, PyObject **fetched,
                                     PyObject *closure) noexcept
    ctypedef struct Counters:
        uint64_t hits, misses, raised, run_code
    ctypedef struct MissOfSpecialization "decltype(trident::Specialization::miss)":
        uint64_t number
        int row
        PyObject *got
    cdef cppclass TimingsPointer "std::unique_ptr<trident::Timings>":
        Timings *get()
    ctypedef struct Specialization:
        MissOfSpecialization miss
        HostProgram *program
        TimingsPointer timings
        int64_t references
        cbool alive
        GuardProgram *guards
        PlanFunction plan
        vector[int] plan_locals
        PyObject *plan_globals
        cbool has_program
        cbool may_call
        PyCodeObject *code
        PyObject *backend
        PyObject *handle
        int64_t isolate_id
        string annotation
        uint64_t hits
        int last_failed
    ctypedef struct SpecializationList:
        vector[Specialization *] items
    ctypedef struct Scm:
        int64_t references
        PyCodeObject *code
        PyObject *owner
        Specialization *skipped
        cbool stale
        cbool sees_functions
        Counters counters
        uint64_t misses_in_a_row
        uint64_t n_noted_misses
        uint64_t passes
        int n_locals
    void scm_measure(Scm *scm, uint64_t n)
    Specialization *specialization_new()
    void specialization_unref(Specialization *s)
    Scm *scm_new(PyCodeObject *code, PyObject *owner)
    void scm_unref(Scm *scm)
    void scm_set_list(Scm *scm, SpecializationList *list)
    SpecializationList *specialization_list_new "new trident::SpecializationList" ()
    void set_backend_matcher(PyObject *matcher)
    void callbacks_changed()

cdef extern from "runtime/frame.h" namespace "trident":
    cdef cppclass ModuleCheck:
        ModuleCheck()
        PyTypeObject *type
        unsigned int type_version
        PyFunctionObject *function
        cbool compiled_call_allowed
        PyObject *forward
    cdef cppclass Door:
        Door()
        PyObject *callable
        PyObject *wrapper
        PyObject *target
        PyObject *method
        Scm *scm
        int64_t isolate_id
        cbool fullgraph
        cbool is_module
        vector[ModuleCheck] checks
        PyObject *reference
    cbool hook_install()
    void hook_uninstall()
    cbool hook_is_on()
    void hook_add(PyCodeObject *code, Scm *scm)
    void hook_remove(PyCodeObject *code)
    cbool hook_has(PyCodeObject *code)
    cbool door_open(Door *door)
    void door_close(PyObject *callable)
    void door_forget(PyObject *callable)
    cbool door_exists(PyObject *callable)
    void door_refuse(PyObject *wrapper, PyObject *reference)
    void door_refusals_clear()
    void doors_close_all()
    void doors_suspend()
    void doors_resume()
    void doors_after_fork_in_child()
    cbool module_doors_patch(PyTypeObject *type)
    void module_doors_unpatch()
    size_t doors_count()
    ctypedef struct Setup:
        PyCodeObject *wrapper_code
        int target_cell, callback_cell
        PyObject *find_door
        PyObject *strict_check
        PyObject *hook_names
        PyObject *global_hooks
        PyObject *global_hook_names
        PyObject *module_codes
    void set_up(const Setup &setup)
    void add_flag(PyObject *dict, PyObject *name, PyObject *expected, PyObject *accepts)
    void set_strict(cbool strict)
    cbool thread_allows_now()

cdef extern from "runtime/dynamo_api.h" namespace "trident::dynamo":
    const char *resolve(PyObject *set_eval_frame, PyObject *get_eval_frame_callback,
                        PyObject *set_override)
    cbool find_extra_index(PyCodeObject *code)
    ctypedef enum Action "trident::dynamo::Action":
        pass
    ctypedef struct FrameRecord:
        Action frame
        Action recursive
        cbool simple
    cbool frame_record(PyCodeObject *code, FrameRecord *record)
