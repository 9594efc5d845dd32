// A stand-in for an accelerator: memory of the CPU under another device's name. Operators run by falling back to the CPU,
// after checking what a real device would check: no operand lies elsewhere, generators belong to the device, and, if asked
// for, there is no float64. Copies back to the host are counted. Only ATen's headers are included, so that it builds fast.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>

using at::Tensor;
constexpr auto OURS = c10::DeviceType::PrivateUse1;
static std::atomic<int64_t> to_host{0};
static std::atomic<bool> has_double{true};

static c10::Device ours() { return c10::Device(OURS, 0); }

static void check_type(at::ScalarType type) {
  TORCH_CHECK_TYPE(has_double || type != at::kDouble, "The stand-in accelerator has no float64.");
}

// ------------------------------------------------------------------------------------------------ the device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return OURS; }
  c10::Device exchangeDevice(c10::Device) const override { return ours(); }
  c10::Device getDevice() const override { return ours(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, ours()); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* start = size ? malloc(size) : nullptr;
    return {start, start, &free, ours()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t size) const override { memcpy(to, from, size); }
};
static Memory memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &memory);

// A generator of this device; its numbers come from one of the CPU that only the fallback sees.
struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator inner;
  explicit DeviceGenerator(at::Generator numbers)
      : c10::GeneratorImpl(ours(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(numbers)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(inner.clone()); }
};
static at::Generator new_generator() {
  return at::make_generator<DeviceGenerator>(at::make_generator<at::CPUGeneratorImpl>());
}
static const at::Generator& default_generator() {
  static auto generator = new_generator();
  return generator;
}
static at::Generator numbers_of(const at::Generator& generator) {
  auto* own = dynamic_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(own, "Expected a generator of the stand-in accelerator, but found one of the CPU");
  return own->inner;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
};

// ------------------------------------------------------------------------------------------------ tensors

static Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  check_type(c10::dtype_or_default(type));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(type), format);
}

static Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> type,
                            std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  check_type(c10::dtype_or_default(type));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(type));
}

// The same memory as a tensor of the CPU.
static Tensor on_cpu(const Tensor& t) {
  if (!t.defined() || t.is_cpu()) return t;
  auto options = t.options().device(at::kCPU).requires_grad(false);
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [keep = t](void*) {}, options);
}

static Tensor to_device(const Tensor& result) {
  if (!result.defined()) return result;
  auto out = at::empty_strided(result.sizes(), result.strides(), result.options().device(ours()));
  on_cpu(out).copy_(result);
  return out;
}

static Tensor copy_from(const Tensor& self, const Tensor& target, bool) {
  if (!self.is_cpu() && target.is_cpu()) to_host++;
  on_cpu(target).copy_(on_cpu(self));
  return target;
}

static Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  if (target.sizes() != self.sizes()) target.resize_(self.sizes());
  return copy_from(self, target, false);
}

static at::Scalar local_scalar(const Tensor& t) {
  to_host++;
  return at::_local_scalar_dense(on_cpu(t));
}

static const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (sizes == self.sizes()) return self;
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  const auto& storage = impl->storage();
  size_t need = (impl->numel() + impl->storage_offset()) * impl->dtype().itemsize();
  if (need > storage.nbytes()) {
    auto start = memory.allocate(need);
    if (storage.nbytes()) memcpy(start.get(), storage.data(), storage.nbytes());
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(start));
    storage.unsafeGetStorageImpl()->set_nbytes(need);
  }
  return self;
}

static Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

static Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

static Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

static Tensor& set_part(Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset.expect_int());
  auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  if (strides.data() && strides.size() == sizes.size()) impl->set_sizes_and_strides(sizes, strides);
  else impl->set_sizes_contiguous(sizes);
  return self;
}

static Tensor& set_whole(Tensor& self, at::Storage storage) {
  std::vector<int64_t> sizes{(int64_t)(storage.nbytes() / self.dtype().itemsize())};
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous(sizes);
  return self;
}

static Tensor& set_as(Tensor& self, const Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_storage_offset(source.storage_offset());
  impl->set_sizes_and_strides(source.sizes(), source.strides());
  return self;
}

// ------------------------------------------------------------------------------------------------ operators

using Indices = c10::List<std::optional<Tensor>>;

static Tensor take(const Tensor& self, const Indices& indices) {  // a real device takes indices from the CPU, too
  Indices moved;
  for (std::optional<Tensor> each : indices) {
    bool is_mask = each && each->defined() && (each->scalar_type() == at::kBool || each->scalar_type() == at::kByte);
    if (is_mask && !each->is_cpu()) to_host++;  // the size of the result depends on the values
    moved.push_back(each && each->defined() ? std::optional<Tensor>(on_cpu(*each)) : each);
  }
  return to_device(at::index(on_cpu(self), moved));
}

static Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                          c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                          bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  TORCH_CHECK(!x.is_cpu() && !weight.is_cpu(), "Expected all tensors to be on the same device in convolution");
  auto b = bias && bias->defined() ? std::optional<Tensor>(on_cpu(*bias)) : std::nullopt;
  return to_device(at::convolution_symint(on_cpu(x), on_cpu(weight), b, stride, padding, dilation, transposed,
                                          output_padding, groups));
}

static std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& x, const Tensor& weight, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> wanted) {
  std::vector<c10::SymInt> sizes{weight.sym_size(transposed ? 1 : 0) * (transposed ? groups : c10::SymInt(1))};
  auto bias = wanted[2] ? at::OptionalSymIntArrayRef(sizes) : at::OptionalSymIntArrayRef();
  auto [gx, gw, gb] = at::convolution_backward_symint(on_cpu(grad), on_cpu(x), on_cpu(weight), bias, stride, padding,
                                                      dilation, transposed, output_padding, groups, wanted);
  return {to_device(gx), to_device(gw), to_device(gb)};
}

// What every other operator does: check the operands, compute on the CPU, copy the result back.
static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto name = op.schema().name();
  bool takes_indices = name == "aten::index_put_" || name == "aten::_index_put_impl_" || name == "aten::index_put";
  bool here = false, elsewhere = false;
  auto look = [&](const Tensor& t) {
    if (!t.defined()) return;
    if (t.device().type() == OURS) { here = true; check_type(t.scalar_type()); }
    else if (t.is_cpu() && t.dim() > 0) elsewhere = true;
  };
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& value = (*stack)[stack->size() - arguments.size() + i];
    if (value.isTensor()) look(value.toTensor());
    else if (value.isTensorList()) for (const Tensor& t : value.toTensorList()) look(t);
    else if (value.isList() && !takes_indices) {
      for (const auto& each : value.toListRef()) if (each.isTensor()) look(each.toTensor());
    } else if (value.isGenerator()) value = c10::IValue(numbers_of(value.toGenerator()));
    else if (value.isNone() && arguments[i].name() == "generator") value = c10::IValue(numbers_of(default_generator()));
  }
  TORCH_CHECK(!(here && elsewhere), "Expected all tensors to be on the same device, but found the stand-in accelerator "
              "and cpu in ", name);
  auto before = to_host.load();
  at::native::cpu_fallback(op, stack);
  // The copies of the fallback do not count, unless the size of the result depends on the values.
  bool sized_by_values = name == "aten::nonzero" || name == "aten::masked_select" || name == "aten::_unique2" ||
                         name == "aten::unique_dim" || name == "aten::unique_consecutive" || name == "aten::equal" ||
                         name == "aten::is_nonzero";
  to_host = before + (sized_by_values ? 1 : 0);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize_);
  m.impl("view", &view);
  m.impl("as_strided", &as_strided);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("set_.source_Storage_storage_offset", &set_part);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Tensor", &set_as);
  m.impl("index.Tensor", &take);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY(stand_in, m) {
  m.def("start", [] { at::RegisterPrivateUse1HooksInterface(new Hooks()); });
  m.def("rng_state", [] { return Tensor::wrap_tensor_impl(default_generator().unsafeGetGeneratorImpl()->get_state()); });
  m.def("set_rng_state", [](const Tensor& s) { default_generator().unsafeGetGeneratorImpl()->set_state(*s.unsafeGetTensorImpl()); });
  m.def("to_host", [] { return to_host.load(); });
  m.def("set_double", [](bool has) { has_double = has; });
}
