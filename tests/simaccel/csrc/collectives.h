// Collectives on device tensors: gloo's, over the same bytes. `init_process_group("cpu:gloo,sim:gloo")`.
#pragma once

#include "kernels.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace simaccel {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// gloo takes CPU tensors, and the dispatcher finds the backend by the tensors' device: a group that shows the device's
// backend as the CPU's. The group itself stays as it is, also when it has no CPU backend.
inline ProcessGroupPtr over_host_bytes(const ProcessGroupPtr& group) {
  auto shadow = c10::make_intrusive<c10d::ProcessGroup>(group->getRank(), group->getSize());
  shadow->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::GLOO, group->getBackend(kSim));
  return shadow;
}

class Collective {
 public:
  static void run(const c10::OperatorHandle& op, Stack* stack) { Collective(op, stack).run(); }

 private:
  Collective(const c10::OperatorHandle& op, Stack* stack) : op_(op), stack_(stack) {}

  void run() {
    const size_t num_args = op_.schema().arguments().size();
    const size_t first = stack_->size() - num_args;
    const c10::IValue outputs = (*stack_)[first];
    for (size_t i = first; i < stack_->size(); ++i) {
      c10::IValue& value = (*stack_)[i];
      value = is_process_group(value) ? c10::IValue(over_host_bytes(value.toCustomClass<c10d::ProcessGroup>()))
                                      : convert(value);
    }
    {
      auto lock = Scheduler::instance().lock();
      Scheduler::instance().synchronize_stream(current_stream(device_));
    }
    op_.callBoxed(stack_);
    wait(stack_->back());
    if (op_.schema().returns().size() == 2) (*stack_)[stack_->size() - 2] = outputs;
  }

  static bool is_process_group(const c10::IValue& value) {
    return value.isObject() && value.type() == c10::getCustomClassType<ProcessGroupPtr>();
  }

  // The work of a collective is done when it returns: gloo's threads write at moments of their own, and nothing in a
  // schedule may depend on those. Point-to-point calls come in pairs on two ranks, so waiting here could block both.
  void wait(const c10::IValue& work) const {
    const auto& name = op_.schema().name();
    if (name == "c10d::send" || name == "c10d::recv_" || name == "c10d::recv_any_source_") return;
    work.toCustomClass<c10d::Work>()->wait();
  }

  c10::IValue convert(const c10::IValue& value) {
    if (value.isTensor()) return convert(value.toTensor());
    if (value.isTensorList()) return convert(value.toTensorVector());
    if (!value.isList() || value.toListRef().empty() || !value.toListRef()[0].isTensorList()) return value;
    c10::List<c10::List<Tensor>> lists;
    for (const c10::IValue& list : value.toListRef()) lists.push_back(convert(list.toTensorVector()));
    return lists;
  }
  c10::List<Tensor> convert(const std::vector<Tensor>& tensors) {
    c10::List<Tensor> list;
    for (const Tensor& t : tensors) list.push_back(convert(t));
    return list;
  }
  Tensor convert(const Tensor& t) {
    if (!t.defined() || !t.is_privateuseone()) return t;
    device_ = t.device().index();
    return host_view(t);
  }

  const c10::OperatorHandle& op_;
  Stack* stack_;
  int device_ = ThreadContext::instance().device;
};

}  // namespace simaccel
