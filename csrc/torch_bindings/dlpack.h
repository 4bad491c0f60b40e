#pragma once
#include <cstdint>

// The part of the DLPack C ABI, version 1, by which a Python tensor shows what it is without torch's C++ ABI:
// `torch.Tensor.__dlpack_c_exchange_api__`. Names and order of members are the standard's (dmlc.github.io/dlpack).
extern "C" {

struct DLDevice {
  int32_t device_type, device_id;
};

struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DLPackVersion {
  uint32_t major, minor;
};

struct DLPackExchangeAPIHeader {
  DLPackVersion version;
  DLPackExchangeAPIHeader* prev_api;  // an older version that the producer serves, too
};

struct DLPackExchangeAPI {
  DLPackExchangeAPIHeader header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  // Borrows: what `out` points to belongs to the object. Not 0: a Python error is set. May be null.
  int (*dltensor_from_py_object_no_sync)(void* object, DLTensor* out);
  void* current_work_stream;
};
}
