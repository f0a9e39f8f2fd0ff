// SPDX-License-Identifier: BSD-3-Clause
// A device of type CUDA for a CPU build of torch: memory of the host, and torch's kernels for CPUs.
//
// It is for tests of what only tensors of a device reach. Its allocations are real, so tensors of
// it are never mistaken for the host's. Copies to pinned memory that need not be waited for come
// when their event is asked for; until then the memory holds garbage, so a result that is right was
// waited for. There is one device, or two; work of all streams is done in the order of the calls.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

namespace {

using at::Tensor;
constexpr int kDevices = 2;
constexpr size_t kAlignment = 512;  // as CUDA's allocations
constexpr int kFresh = 0xC3, kNotYet = 0xFF;  // bytes of new memory, and of copies on their way

thread_local c10::DeviceIndex current = 0;
thread_local int64_t streams[kDevices] = {0, 0};

c10::Device device_of(c10::DeviceIndex index) {
  return {c10::kCUDA, index < 0 ? current : index};
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device getDevice() const override { return device_of(current); }
  c10::Device exchangeDevice(c10::Device to) const override {
    c10::Device before = getDevice();
    setDevice(to);
    return before;
  }
  void setDevice(c10::Device to) const override { current = device_of(to.index()).index(); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { setDevice(to); }
  c10::Stream getStream(c10::Device on) const override {
    c10::Device device = device_of(on.index());
    return c10::Stream(c10::Stream::UNSAFE, device, streams[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device on) const override {
    return c10::Stream(c10::Stream::DEFAULT, device_of(on.index()));
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    c10::Stream before = getStream(to.device());
    streams[to.device_index()] = to.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  // Autograd brackets its threads with events; everything is done by then.
  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    *event = const_cast<Guard*>(this);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// -- memory -------------------------------------------------------------------------------------

std::mutex lock;
std::map<char*, size_t> pinned;  // by address
int64_t allocated = 0, peak = 0;

void* aligned(size_t size) {
  void* memory = nullptr;
  if (posix_memalign(&memory, kAlignment, size) != 0) throw std::bad_alloc();
  std::memset(memory, kFresh, size);
  return memory;
}

void free_memory(void* memory) {
  if (memory == nullptr) return;
  char* header = static_cast<char*>(memory) - kAlignment;
  std::lock_guard<std::mutex> held(lock);
  allocated -= *reinterpret_cast<int64_t*>(header);
  std::free(header);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &free_memory, device_of(current)};
    char* header = static_cast<char*>(aligned(size + kAlignment));
    *reinterpret_cast<int64_t*>(header) = static_cast<int64_t>(size);
    std::lock_guard<std::mutex> held(lock);
    allocated += static_cast<int64_t>(size);
    peak = std::max(peak, allocated);
    return {header + kAlignment, header + kAlignment, &free_memory, device_of(current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_memory; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
} memory;

void free_pinned(void* address) {
  std::lock_guard<std::mutex> held(lock);
  pinned.erase(static_cast<char*>(address));
  std::free(address);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &free_pinned, c10::kCPU};
    char* address = static_cast<char*>(aligned(size));
    std::lock_guard<std::mutex> held(lock);
    pinned[address] = size;
    return {address, address, &free_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
} pinned_memory;

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> held(lock);
  auto next = pinned.upper_bound(const_cast<char*>(static_cast<const char*>(address)));
  if (next == pinned.begin()) return false;
  auto [start, size] = *std::prev(next);
  return static_cast<const char*>(address) < start + size;
}

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex to) const override { current = to; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex to) const override {
    return std::exchange(current, to);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex to) const override {
    return to < 0 ? current : exchangeDevice(to);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);  // torch looks for this name

// -- copies that come late ----------------------------------------------------------------------

struct Copy {
  uint64_t number;
  Tensor to, values;
};
std::deque<Copy> under_way;
uint64_t copies = 0;

void arrive(uint64_t last) {
  std::vector<Copy> due;  // whose memory may be freed below, which takes the lock
  {
    std::lock_guard<std::mutex> held(lock);
    for (; !under_way.empty() && under_way.front().number <= last; under_way.pop_front()) {
      due.push_back(std::move(under_way.front()));
    }
  }
  for (const Copy& copy : due) {
    std::memcpy(copy.to.data_ptr(), copy.values.data_ptr(), copy.values.nbytes());
  }
}

// -- operations ---------------------------------------------------------------------------------

using Plain = c10::impl::ExcludeDispatchKeyGuard;  // kernels of CPUs, without autograd's part

Tensor on_host(const Tensor& tensor) {  // shares the memory
  auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  Tensor host;
  if (tensor.numel() == 0 || tensor.storage().data() == nullptr) {
    host = at::empty(tensor.sizes(), options);
  } else {
    c10::Storage keep = tensor.storage();
    host = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                         [keep](void*) {}, options);
  }
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

Tensor on_device(const Tensor& host, c10::Device device) {  // a copy
  if (!host.defined() || !host.is_cpu()) return host;
  Plain plain(c10::autograd_dispatch_keyset);
  c10::DeviceGuard guard(device);
  Tensor result = at::detail::empty_strided_generic(
      host.sizes(), host.strides(), &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
      host.scalar_type());
  on_host(result).copy_(host.resolve_conj().resolve_neg());
  return result;
}

// Every operation without a kernel here is the CPU's, on tensors that share the memory. What it
// makes is copied to the device; an argument that it writes to is returned as it was given.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack) {}

  void run() {
    size_t count = schema_.arguments().size();
    given_.assign(stack_->end() - static_cast<long>(count), stack_->end());
    for (size_t i = 0; i < count; i++) {
      (*stack_)[stack_->size() - count + i] = taken(given_[i], is_out(schema_.arguments()[i]));
    }
    {
      Plain plain(c10::autograd_dispatch_keyset);
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
      for (auto& [target, host] : outs_) {
        if (target.sizes() != host.sizes()) target.resize_(host.sizes());
        if (host.numel() != 0) on_host(target).copy_(host);
      }
    }
    size_t results = schema_.returns().size();
    for (size_t i = 0; i < results; i++) {
      at::IValue& result = (*stack_)[stack_->size() - results + i];
      result = returned(result, schema_.returns()[i]);
    }
  }

 private:
  static bool is_out(const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite() &&
           argument.kwarg_only();
  }

  Tensor host(const Tensor& tensor, bool is_out) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    if (!device_) device_ = tensor.device();
    if (!is_out) return on_host(tensor);
    // Empty, since some kernels give it other sizes first, and torch warns where it had any.
    Tensor made = at::empty({0}, tensor.options().device(c10::kCPU).requires_grad(false));
    outs_.emplace_back(tensor, made);
    return made;
  }

  at::IValue taken(const at::IValue& value, bool is_out) {
    if (value.isTensor()) return host(value.toTensor(), is_out);
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(host(tensor, false));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList()) {
        list.push_back(tensor ? std::make_optional(host(*tensor, false)) : tensor);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      if (!device_) device_ = device_of(value.toDevice().index());
      return c10::Device(c10::kCPU);
    }
    return value;
  }

  at::IValue returned(const at::IValue& value, const c10::Argument& as) const {
    if (as.alias_info() != nullptr && as.alias_info()->isWrite()) {
      for (size_t i = 0; i < given_.size(); i++) {
        const auto* alias = schema_.arguments()[i].alias_info();
        if (alias != nullptr && *alias == *as.alias_info()) return given_[i];
      }
    }
    c10::Device device = device_.value_or(device_of(current));
    if (value.isTensor()) return on_device(value.toTensor(), device);
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) {
        list.push_back(on_device(tensor, device));
      }
      return list;
    }
    return value;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  std::vector<at::IValue> given_;
  std::vector<std::pair<Tensor, Tensor>> outs_;  // on the device, and what stands for it
  std::optional<c10::Device> device_;
};

void call(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

// What makes tensors, or other tensors of the same memory, has to be the device's own.

const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

void refuse_pinning(bool pins) { TORCH_CHECK(!pins, "Only dense CPU tensors can be pinned"); }

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout>, std::optional<c10::Device> device,
             std::optional<bool> pins, std::optional<at::MemoryFormat> format) {
  refuse_pinning(pins.value_or(false));
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, &memory, kKeys, at::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<c10::Device> device, std::optional<bool> pins) {
  refuse_pinning(pins.value_or(false));
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &memory, kKeys,
                                           at::dtype_or_default(dtype));
}

Tensor view_of(const Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
               std::optional<int64_t> offset = std::nullopt) {
  Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides,
                                                    offset.value_or(self.storage_offset()));
  return view;
}

Tensor view(const Tensor& self, at::IntArrayRef sizes) {
  auto whole = at::infer_size(sizes, self.numel());
  auto strides = at::detail::computeStride(self.sizes(), self.strides(), whole);
  TORCH_CHECK(strides.has_value(), "view size is not compatible with input tensor's size and "
              "stride (at least one dimension spans across two contiguous subspaces). Use "
              ".reshape(...) instead.");
  return view_of(self, whole, *strides);
}

Tensor reshape_alias(const Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return view_of(self, sizes, strides);
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  c10::Storage storage = self.storage();
  size_t needed = (self.numel() + self.storage_offset()) * self.itemsize();
  if (needed > storage.nbytes()) {
    c10::DeviceGuard guard(self.device());
    c10::DataPtr larger = memory.allocate(needed);
    if (storage.nbytes() != 0) std::memcpy(larger.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(larger));
    storage.set_nbytes(needed);
  }
  return self;
}

Tensor& set_part(Tensor& self, c10::Storage storage, int64_t offset, at::IntArrayRef sizes,
                 at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (strides.size() == sizes.size()) {
    impl->set_sizes_and_strides(sizes, strides, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(sizes);
  }
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage) {
  int64_t count = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_part(self, std::move(storage), 0, {count}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& other) {
  return set_part(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, memory.allocate(0), &memory, true);
  return set_part(self, std::move(none), 0, {0}, {1});
}

at::Scalar item(const Tensor& self) {
  arrive(UINT64_MAX);
  return on_host(self).item();
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  Tensor from = source.is_cuda() ? on_host(source) : source;
  Plain plain(c10::autograd_dispatch_keyset);
  bool is_download = self.is_cpu() && source.is_cuda();
  if (is_download && non_blocking && self.is_contiguous() && self.numel() != 0 &&
      is_pinned(self.data_ptr())) {
    Tensor values = at::empty(self.sizes(), self.options().pinned_memory(false));
    values.copy_(from.expand_as(self));
    std::memset(self.data_ptr(), kNotYet, self.nbytes());
    std::lock_guard<std::mutex> held(lock);
    under_way.push_back({++copies, self, values});
    return self;
  }
  if (is_download) arrive(UINT64_MAX);  // torch waits for the stream
  (self.is_cuda() ? on_host(self) : self).copy_(from);
  return self;
}

void record_stream(Tensor&, c10::Stream) {}

bool is_never_pinned(const Tensor&, std::optional<c10::Device>) { return false; }

Tensor pin_memory(const Tensor& self, std::optional<c10::Device>) {
  refuse_pinning(true);
  return self;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&call>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &view_of);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_nothing);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_part);
  m.impl("_local_scalar_dense", &item);
  m.impl("copy_", &copy_);
  m.impl("record_stream", &record_stream);
  m.impl("is_pinned", &is_never_pinned);
  m.impl("pin_memory", &pin_memory);
}

}  // namespace

// -- for Python, by ctypes ----------------------------------------------------------------------

extern "C" {
void pretended_begin() { c10::SetAllocator(c10::kCUDA, &memory); }
int pretended_device() { return current; }
void pretended_set_device(int to) { current = static_cast<c10::DeviceIndex>(to); }
int64_t pretended_stream(int device) { return streams[device]; }
void pretended_set_stream(int device, int64_t to) { streams[device] = to; }
uint64_t pretended_copies() { return copies; }  // so many have been asked for
void pretended_arrive(uint64_t last) { arrive(last); }
int64_t pretended_allocated() { return allocated; }
int64_t pretended_peak(int resets) {
  int64_t found = peak;
  if (resets != 0) peak = allocated;
  return found;
}
}
