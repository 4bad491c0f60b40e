// A layer's call without torch's dispatcher. Passing eleven tensors through it takes longer than a kernel's launch.
//
// `LayerCall(op, bound).run(*tensors)` is `op(*tensors, bound)`. Where the tensors look as they did in the last call
// that the op has checked (shape, stride, dtype, device, alignment, which are absent), the checks would find the same,
// and the call is repeated with their addresses. Every other call goes to the op, which checks it, names what is wrong,
// and is what a compiler, a mode or a profiler sees. So there is one contract, and nothing of it is written twice.
//
// Built for Python's limited API: one file serves every version from 3.10.
#include <Python.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "layer_call/header.h"
#include "torch_bindings/dlpack.h"

extern "C" bool aoti_torch_grad_mode_is_enabled();  // torch's stable C API

namespace attnops::layer_call {
namespace {

constexpr int kMaxDims = 4;

// What a tensor looks like, but for its address.
struct Look {
  bool present, has_memory;
  DLDevice device;
  DLDataType dtype;
  int32_t ndim;
  uint64_t alignment;  // address modulo kAlignment
  int64_t shape[kMaxDims], strides[kMaxDims];

  static uint64_t alignment_of(const DLTensor& t) { return reinterpret_cast<uintptr_t>(t.data) % kAlignment; }

  explicit Look(const DLTensor& t)
      : present(true),
        has_memory(t.data != nullptr),
        device(t.device),
        dtype(t.dtype),
        ndim(t.ndim),
        alignment(alignment_of(t)) {
    std::copy_n(t.shape, ndim, shape);
    std::copy_n(t.strides, ndim, strides);
  }

  bool is_of(const DLTensor& t) const {
    return present && (t.data != nullptr) == has_memory && t.ndim == ndim &&
           std::equal(t.shape, t.shape + ndim, shape) && std::equal(t.strides, t.strides + ndim, strides) &&
           t.dtype.code == dtype.code && t.dtype.bits == dtype.bits && t.device.device_type == device.device_type &&
           t.device.device_id == device.device_id && alignment_of(t) == alignment;
  }
};

struct LayerCall {
  PyObject_HEAD PyObject* op;
  PyObject* bound;
  BoundHeader* header;  // in the bytes of `bound`
  uint64_t calls;       // header->calls after the call that `looks` are of; 0: none
  Look looks[kCallTensors];
};

// Set once by setup().
const DLPackExchangeAPI* exchange;
PyObject *tensor_type, *parameter_type;
PyObject* watchers;  // tuple of functions that give true while somebody watches torch's ops

// Whether a plain tensor shows what it is. Subclasses (of tracers, of users) and wrapped tensors do not.
bool show(PyObject* object, DLTensor& tensor) {
  const auto type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type != tensor_type && type != parameter_type) return false;
  if (exchange->dltensor_from_py_object_no_sync(object, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  return tensor.ndim <= kMaxDims;
}

// Whether torch records gradients: they are the dispatcher's business. Serving runs without.
bool is_watched() {
  if (aoti_torch_grad_mode_is_enabled()) return true;
  for (Py_ssize_t i = 0; i < PyTuple_Size(watchers); ++i) {
    PyObject* answer = PyObject_CallNoArgs(PyTuple_GetItem(watchers, i));
    const bool watches = answer == nullptr || PyObject_IsTrue(answer) != 0;
    Py_XDECREF(answer);
    if (watches) {
      PyErr_Clear();
      return true;
    }
  }
  return false;
}

bool looks_as_before(const LayerCall& call, PyObject* const* tensors, void** addresses) {
  if (call.calls == 0 || call.calls != calls_of(*call.header)) return false;
  for (int i = 0; i < kCallTensors; ++i) {
    addresses[i] = nullptr;
    if (tensors[i] == Py_None) {
      if (call.looks[i].present) return false;
      continue;
    }
    DLTensor tensor;
    if (!show(tensors[i], tensor) || !call.looks[i].is_of(tensor)) return false;
    addresses[i] = tensor.data;
  }
  return true;
}

// After a call that the op has checked; before it there were `calls`. Nothing if another thread's call came between:
// what is kept may then be that one.
void remember(LayerCall& call, PyObject* const* tensors, uint64_t calls) {
  call.calls = 0;
  if (calls_of(*call.header) != calls + 1) return;
  for (int i = 0; i < kCallTensors; ++i) {
    call.looks[i].present = false;
    if (tensors[i] == Py_None) continue;
    DLTensor tensor;
    if (!show(tensors[i], tensor)) return;
    call.looks[i] = Look(tensor);
  }
  call.calls = calls + 1;
}

PyObject* through_the_op(LayerCall& call, PyObject* const* tensors, bool watched) {
  PyObject* arguments = PyTuple_New(kCallTensors + 1);
  if (arguments == nullptr) return nullptr;
  for (int i = 0; i <= kCallTensors; ++i) {
    PyObject* argument = i < kCallTensors ? tensors[i] : call.bound;
    Py_INCREF(argument);
    PyTuple_SetItem(arguments, i, argument);
  }
  const uint64_t calls = calls_of(*call.header);
  PyObject* result = PyObject_CallObject(call.op, arguments);
  Py_DECREF(arguments);
  if (result != nullptr && !watched) remember(call, tensors, calls);
  return result;
}

PyObject* run(PyObject* self, PyObject* const* tensors, Py_ssize_t count) {
  if (count != kCallTensors) {
    return PyErr_Format(PyExc_TypeError, "attnops: a layer's call takes %d tensors or None, got %zd", kCallTensors,
                        count);
  }
  LayerCall& call = *reinterpret_cast<LayerCall*>(self);
  const bool watched = is_watched();
  void* addresses[kCallTensors];
  if (watched || !looks_as_before(call, tensors, addresses)) return through_the_op(call, tensors, watched);
  const uint64_t calls = call.calls;           // of these looks: other threads may change both from here on
  PyThreadState* state = PyEval_SaveThread();  // a launch may wait for room in the stream
  const char* problem = repeat_of(*call.header)(call.header, calls, addresses);
  PyEval_RestoreThread(state);
  if (problem != nullptr && std::strcmp(problem, kOutdated) == 0) return through_the_op(call, tensors, watched);
  if (problem != nullptr) {
    PyErr_SetString(PyExc_RuntimeError, problem);
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *op, *bound;
  Py_ssize_t address;
  if (!PyArg_ParseTuple(arguments, "OOn", &op, &bound, &address)) return nullptr;
  if (exchange == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "attnops: setup() must run first");
    return nullptr;
  }
  const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
  PyObject* self = allocate(type, 0);  // zeros
  if (self == nullptr) return nullptr;
  LayerCall& call = *reinterpret_cast<LayerCall*>(self);
  Py_INCREF(op), Py_INCREF(bound);
  call.op = op, call.bound = bound;
  call.header = reinterpret_cast<BoundHeader*>(address);
  return self;
}

void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  const LayerCall& call = *reinterpret_cast<LayerCall*>(self);
  Py_XDECREF(call.op), Py_XDECREF(call.bound);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

// Whether torch offers what this module needs.
PyObject* setup(PyObject*, PyObject* arguments) {
  PyObject *tensor, *parameter, *functions;
  if (!PyArg_ParseTuple(arguments, "OOO!", &tensor, &parameter, &PyTuple_Type, &functions)) return nullptr;
  PyObject* capsule = PyObject_GetAttrString(tensor, "__dlpack_c_exchange_api__");
  const void* found = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : nullptr;
  PyErr_Clear();
  Py_XDECREF(capsule);  // torch keeps the table for good
  const auto* header = static_cast<const DLPackExchangeAPIHeader*>(found);
  while (header != nullptr && header->version.major != 1) header = header->prev_api;
  const auto* api = reinterpret_cast<const DLPackExchangeAPI*>(header);
  if (api == nullptr || api->dltensor_from_py_object_no_sync == nullptr) Py_RETURN_FALSE;
  Py_INCREF(tensor), Py_INCREF(parameter), Py_INCREF(functions);
  tensor_type = tensor, parameter_type = parameter, watchers = functions;
  exchange = api;
  Py_RETURN_TRUE;
}

PyMethodDef methods[] = {{"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&run)), METH_FASTCALL,
                          "The op's call with these tensors and `bound`."},
                         {}};

PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(&make)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(&destroy)},
                       {Py_tp_methods, methods},
                       {}};

PyType_Spec spec = {"attnops._layer_call.LayerCall", sizeof(LayerCall), 0, Py_TPFLAGS_DEFAULT, slots};

PyMethodDef functions[] = {{"setup", &setup, METH_VARARGS, "Tells the module torch's types. False: torch is too old."},
                           {}};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_layer_call", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace attnops::layer_call

PyMODINIT_FUNC PyInit__layer_call() {
  using namespace attnops::layer_call;
  PyObject* module = PyModule_Create(&definition);
  PyObject* type = module ? PyType_FromSpec(&spec) : nullptr;
  if (type == nullptr || PyModule_AddObject(module, "LayerCall", type) != 0) {
    Py_XDECREF(type);
    Py_XDECREF(module);
    return nullptr;
  }
  return module;
}
