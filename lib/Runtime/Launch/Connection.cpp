//===- Connection.cpp - a session's ranks, and how they reach each other --===//
#include "fsdp/Runtime/Launch/Connection.h"
#include "fsdp/Plan/DeviceBuffers.h"
#include "fsdp/Runtime/Collectives/DeviceComm.h"
#include "fsdp/Runtime/Collectives/ShmComm.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Operators/CallTable.h"

#include <atomic>
#include <optional>

namespace fsdp::runtime {

namespace {

/// Describes a position, in whichever plan of the transport a rank is.
std::string describeStep(const Position &position) {
  if (position.step.load() < 0)
    return " before its first step";
  return " at step " + std::to_string(position.step.load() + 1) +
         ", instruction " + std::to_string(position.instruction.load());
}

/// Through memory that the ranks of one host share.
class SharedConnection : public Connection {
public:
  SharedConnection(const plan::Plan &plan, Rendezvous &rendezvous,
                   std::chrono::milliseconds deadline,
                   const SharedConnection *other)
      : rank(rendezvous.rank()), segment(shareSegment(plan, rendezvous)),
        parameters(other ? other->parameters : segment) {
    if (other)
      segment->useParametersOf(*parameters);
    ownComm.emplace(plan, *segment, rank, /*concurrent=*/false,
                    other ? &*other->ownComm : nullptr);
    ownComm->setPatience(
        std::make_shared<Patience>(deadline, [&plan](const Position &position) {
          return describePosition(plan, position);
        }));
  }

  Comm &comm() override { return *ownComm; }
  Position &position() override { return segment->state(rank).position; }

  void fail(const std::string &message) override {
    segment->fail(rank, message);
  }
  bool hasFailed() override { return segment->header().aborted.load() != 0; }
  std::string failure() override {
    int32_t failed = segment->header().failedRank.load();
    return failed < 0 ? ""
                      : "rank " + std::to_string(failed) + ": " +
                            segment->state(failed).failure;
  }

  std::shared_ptr<const void> memory() const override { return parameters; }

private:
  int64_t rank;
  std::shared_ptr<ShmSegment> segment;
  /// Where the parameters lie.
  std::shared_ptr<ShmSegment> parameters;
  std::optional<ShmComm> ownComm;
};

/// Over a transport, which all plans of the same parameters have.
class RemoteConnection : public Connection {
public:
  RemoteConnection(Backend backend, const plan::Plan &plan,
                   Rendezvous &rendezvous, Device &device,
                   std::chrono::milliseconds deadline,
                   const RemoteConnection *other)
      : rank(rendezvous.rank()),
        ownPosition(other ? other->ownPosition : std::make_shared<Position>()),
        transport(
            other ? other->transport
                  : makeTransport(
                        backend, rendezvous.connectStore(), rank,
                        rendezvous.worldSize(), device,
                        {std::make_shared<Patience>(deadline, describeStep),
                         nullptr, &*ownPosition, rendezvous.storeServer()})) {
    try {
      ownComm.emplace(plan, device, transport,
                      other ? &*other->ownComm : nullptr);
    } catch (const AbortedError &) {
      throw;
    } catch (const std::exception &error) {
      transport->fail(error.what());
      throw;
    }
  }

  Comm &comm() override { return *ownComm; }
  Position &position() override { return *ownPosition; }

  void fail(const std::string &message) override {
    failed = true;
    transport->fail(message);
  }
  bool hasFailed() override { return failed; }
  std::string failure() override {
    failed = true;
    return transport->failure();
  }

  std::shared_ptr<const void> memory() const override { return nullptr; }

private:
  int64_t rank;
  /// Of all plans, as the transport shows it.
  std::shared_ptr<Position> ownPosition;
  std::shared_ptr<Transport> transport;
  std::optional<DeviceComm> ownComm;
  std::atomic<bool> failed = false;
};

} // namespace

std::unique_ptr<Connection> makeConnection(Backend backend, plan::Plan &plan,
                                           Rendezvous &rendezvous,
                                           Device &device,
                                           std::chrono::milliseconds deadline,
                                           const Connection *other) {
  if (backend == Backend::Shm)
    return std::make_unique<SharedConnection>(
        plan, rendezvous, deadline,
        static_cast<const SharedConnection *>(other));
  plan::addDeviceBuffers(plan);
  return std::make_unique<RemoteConnection>(
      backend, plan, rendezvous, device, deadline,
      static_cast<const RemoteConnection *>(other));
}

} // namespace fsdp::runtime
