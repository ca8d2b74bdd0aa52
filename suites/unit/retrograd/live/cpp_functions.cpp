// Custom autograd functions and hooks written in C++, for test_cpp_functions.py.

#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

namespace {

// x * y * factor, from saved tensors and a saved number.
template <bool traceable>
struct Product : Function<Product<traceable>> {
  static constexpr bool is_traceable = traceable;
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& y, double factor) {
    ctx->save_for_backward({x, y});
    ctx->saved_data["factor"] = factor;
    return x * y * factor;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    auto saved = ctx->get_saved_variables();
    auto factor = ctx->saved_data["factor"].toDouble();
    return {grads[0] * saved[1] * factor, grads[0] * saved[0] * factor, Tensor()};
  }
};

// x * 2 and x * 3; adds 100 where the second gradient is undefined, which it is told.
struct TwoOutputs : Function<TwoOutputs> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, bool materialize) {
    ctx->set_materialize_grads(materialize);
    return {x * 2, x * 3};
  }
  static variable_list backward(AutogradContext*, variable_list grads) {
    auto first = grads[0].defined() ? grads[0] * 2 : Tensor();
    if (!grads[1].defined()) {
      return {first.defined() ? first + 100 : first, Tensor()};
    }
    return {first.defined() ? first + grads[1] * 3 : grads[1] * 3, Tensor()};
  }
};

// The identity, whose gradient is undefined.
struct Vanish : Function<Vanish> {
  static Tensor forward(AutogradContext*, const Tensor& x) { return x.clone(); }
  static variable_list backward(AutogradContext*, variable_list) { return {Tensor()}; }
};

// Counts its backwards on its context; looks at what is needed.
struct Counting : Function<Counting> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& y) {
    ctx->saved_data["count"] = int64_t(0);
    return x + y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    auto count = ctx->saved_data["count"].toInt() + 1;
    ctx->saved_data["count"] = count;
    auto extra = ctx->needs_input_grad(1) ? 10 : 20;
    return {grads[0] * count * extra, ctx->needs_input_grad(1) ? grads[0] : Tensor()};
  }
};

// Refuses to be differentiated.
struct Refuse : Function<Refuse> {
  static Tensor forward(AutogradContext*, const Tensor& x) { return x.clone(); }
  static variable_list backward(AutogradContext*, variable_list) { TORCH_CHECK_VALUE(false, "refused in C++"); }
};

Tensor product(const Tensor& x, const Tensor& y, double factor, bool traceable) {
  return traceable ? Product<true>::apply(x, y, factor) : Product<false>::apply(x, y, factor);
}
std::tuple<Tensor, Tensor> two_outputs(const Tensor& x, bool materialize) {
  auto outputs = TwoOutputs::apply(x, materialize);
  return {outputs[0], outputs[1]};
}
Tensor vanish(const Tensor& x) { return Vanish::apply(x); }
Tensor counting(const Tensor& x, const Tensor& y) { return Counting::apply(x, y); }
Tensor refuse(const Tensor& x) { return Refuse::apply(x); }
void scale_gradient(const Tensor& x, double factor) {
  x.register_hook([factor](const Tensor& grad) { return grad * factor; });
}

}  // namespace

TORCH_LIBRARY(retrograd_tests, library) {
  library.def("product(Tensor x, Tensor y, float factor, bool traceable) -> Tensor", &product);
  library.def("two_outputs(Tensor x, bool materialize) -> (Tensor, Tensor)", &two_outputs);
  library.def("vanish(Tensor x) -> Tensor", &vanish);
  library.def("counting(Tensor x, Tensor y) -> Tensor", &counting);
  library.def("refuse(Tensor x) -> Tensor", &refuse);
  library.def("scale_gradient(Tensor x, float factor) -> ()", &scale_gradient);
}
