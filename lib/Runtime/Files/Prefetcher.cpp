//===- Prefetcher.cpp - batches read beside the step ----------------------===//
#include "fsdp/Runtime/Files/Prefetcher.h"

#include <algorithm>
#include <csignal>

#include <pthread.h>

namespace fsdp::runtime {

Prefetcher::Prefetcher(const plan::Plan &plan, const FileData &data,
                       int64_t rank, Device &device)
    : data(data), rank(rank), stride(samplesPerMicrobatch(plan)),
      views(!device.where().is_cpu()) {
  size_t bytes = std::max<size_t>(data.batchBytes(), 1);
  memory = device.reserveHost(bytes * slots.size());
  for (size_t i = 0; i < slots.size(); ++i)
    slots[i].memory = {memory->base() + i * bytes, bytes};
  // Signals are for the thread that started this one.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread = std::thread([this] { work(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread.native_handle(), "fsdp-data");
}

Prefetcher::~Prefetcher() {
  {
    std::lock_guard guard(lock);
    stops = true;
  }
  changed.notify_all();
  thread.join();
}

void Prefetcher::work() {
  std::unique_lock guard(lock);
  while (true) {
    changed.wait(guard, [&] {
      return stops || (position && writes - reads < slots.size());
    });
    if (stops)
      return;
    Slot &slot = slots[writes % slots.size()];
    int64_t first = *position;
    uint64_t began = generation;
    guard.unlock();
    std::exception_ptr error;
    try {
      data.fill(first, rank, slot.memory);
    } catch (...) {
      error = std::current_exception();
    }
    guard.lock();
    if (generation != began)
      continue; // nobody waits for it any more
    slot.first = first;
    slot.error = error;
    position = first + stride;
    ++writes;
    changed.notify_all();
  }
}

std::vector<at::Tensor> Prefetcher::next(int64_t first) {
  std::unique_lock guard(lock);
  if (held) {
    held = false;
    ++reads;
  }
  int64_t expected = writes > reads ? slots[reads % slots.size()].first
                     : position     ? *position
                                    : -1;
  if (expected != first) {
    ++generation;
    writes = reads;
    position = first;
  }
  changed.notify_all();
  changed.wait(guard, [&] { return writes > reads; });
  Slot &slot = slots[reads % slots.size()];
  held = true;
  // The worker leaves the slot alone while it is held.
  guard.unlock();
  if (slot.error)
    std::rethrow_exception(slot.error);
  if (views)
    return data.view(slot.memory);
  std::vector<at::Tensor> batch = data.copy(slot.memory);
  guard.lock();
  held = false;
  ++reads;
  changed.notify_all();
  return batch;
}

} // namespace fsdp::runtime
