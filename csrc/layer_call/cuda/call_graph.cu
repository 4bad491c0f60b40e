#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>
#include <utility>

#include "device/common/launch_list.h"
#include "layer_call/cuda/call_graph.h"

namespace attnops::layer_call {
namespace {

// What this thread does to make or free a graph must not spoil what another one records.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

bool is_recorded(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) return status != cudaStreamCaptureStatusNone;
  cudaGetLastError();  // the legacy stream, while another one records: a launch says what is wrong
  return true;
}

class CallGraph {
 public:
  CallGraph() = default;
  CallGraph(const CallGraph&) = delete;
  CallGraph& operator=(const CallGraph&) = delete;
  ~CallGraph() { clear(); }

  // False: the launches are the caller's to make.
  bool submit(LaunchList& list, cudaStream_t stream) {
    if (exec_ == nullptr) {
      if (calls_ == kCallsBefore || ++calls_ < kCallsBefore) return false;  // made already, or not yet
      if (!make(list)) return false;
      stream_ = stream;
    } else if (stream != stream_ || !update(list)) {
      return false;
    }
    check_cuda(cudaGraphLaunch(exec_, stream), "a call's graph");
    return true;
  }

 private:
  // Making a graph takes as long as several calls, and it takes some 110 KB of the device's memory: calls of shapes
  // that come often have one, the first so many of them.
  static constexpr int kCallsBefore = 8, kMostGraphs = 512;

  // Whether there is a graph now. Where it cannot be made (memory is short) calls are launched for good.
  bool make(LaunchList& list) {
    if (made_.fetch_add(1) >= kMostGraphs) {
      made_.fetch_sub(1);
      return false;
    }
    const RelaxedCapture relaxed;
    cudaStream_t aside = nullptr;
    const bool made = cudaStreamCreateWithFlags(&aside, cudaStreamNonBlocking) == cudaSuccess && record(list, aside) &&
                      cudaGraphInstantiate(&exec_, graph_, 0) == cudaSuccess;
    if (aside != nullptr) cudaStreamDestroy(aside);
    counts_ = true;
    if (!made) clear();
    cudaGetLastError();
    return made;
  }

  bool record(LaunchList& list, cudaStream_t aside) {
    if (cudaStreamBeginCapture(aside, cudaStreamCaptureModeRelaxed) != cudaSuccess) return false;
    bool launched = true;
    try {
      list.launch(aside);
    } catch (const std::exception&) {
      launched = false;  // the stream's own launch will say why
    }
    if (cudaStreamEndCapture(aside, &graph_) != cudaSuccess || !launched) return false;
    size_t count = LaunchList::kMost, first = 1;
    cudaGraphNode_t root = nullptr;
    if (cudaGraphGetNodes(graph_, nodes_, &count) != cudaSuccess || static_cast<int>(count) != list.count())
      return false;
    // One launch has none ahead of it.
    if (cudaGraphGetRootNodes(graph_, &root, &first) != cudaSuccess || first != 1) return false;
    if (nodes_[0] != root) std::swap(nodes_[0], nodes_[1]);
    last_ = std::make_unique<LaunchList>(list);
    return true;
  }

  // The launches' arguments into the graph, where they are not there yet.
  bool update(LaunchList& list) {
    if (list.count() != last_->count()) return false;
    for (int i = 0; i < list.count(); ++i) {
      LaunchList::Launch &now = list[i], &before = (*last_)[i];
      if (now.kernel != before.kernel || now.bytes != before.bytes || !same_attributes(now, before)) return false;
      if (same_shape(now.config, before.config) && std::memcmp(now.memory, before.memory, now.bytes) == 0) continue;
      void* arguments[LaunchList::kMostArguments];
      now.point_to(arguments);
      cudaKernelNodeParams params{};
      params.func = const_cast<void*>(now.kernel);
      params.gridDim = now.config.gridDim;
      params.blockDim = now.config.blockDim;
      params.sharedMemBytes = static_cast<unsigned>(now.config.dynamicSmemBytes);
      params.kernelParams = arguments;
      check_cuda(cudaGraphExecKernelNodeSetParams(exec_, nodes_[i], &params), "a call's graph");
      before.config = now.config;
      std::memcpy(before.memory, now.memory, now.bytes);
    }
    return true;
  }

  static bool same_attributes(const LaunchList::Launch& a, const LaunchList::Launch& b) {
    return a.config.numAttrs == b.config.numAttrs &&
           std::memcmp(a.attributes, b.attributes, a.config.numAttrs * sizeof(cudaLaunchAttribute)) == 0;
  }

  static bool same_shape(const cudaLaunchConfig_t& a, const cudaLaunchConfig_t& b) {
    const auto same = [](const dim3& x, const dim3& y) { return x.x == y.x && x.y == y.y && x.z == y.z; };
    return same(a.gridDim, b.gridDim) && same(a.blockDim, b.blockDim) && a.dynamicSmemBytes == b.dynamicSmemBytes;
  }

  void clear() {
    const RelaxedCapture relaxed;
    if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
    exec_ = nullptr, graph_ = nullptr;
    if (counts_) made_.fetch_sub(1);
    counts_ = false;
  }

  inline static std::atomic<int> made_{0};  // by this process, and not freed yet

  bool counts_ = false;
  int calls_ = 0;
  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
  cudaGraphNode_t nodes_[LaunchList::kMost];
  std::unique_ptr<LaunchList> last_;  // what the graph has
};

}  // namespace

void submit(void** kept, const void* call, void (*launch)(const void*, CUstream_st*), CUstream_st* stream) {
  if (is_recorded(stream)) return launch(call, stream);
  LaunchList list;
  {
    const LaunchList::Active active(list);
    launch(call, stream);
  }
  if (*kept == nullptr) *kept = new CallGraph;
  if (!static_cast<CallGraph*>(*kept)->submit(list, stream)) list.launch(stream);
}

void forget(void* kept) { delete static_cast<CallGraph*>(kept); }

}  // namespace attnops::layer_call
