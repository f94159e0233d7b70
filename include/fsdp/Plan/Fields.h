//===- Fields.h - what the structs of a plan consist of -------------------===//
//
// Each struct of a plan lists its fields once, in a static function `fields()`
// beside its members. From that list come the reader and the printer of the
// JSON form, the walk over operands and results, the checks of indices and of
// parallel lists, and the table of instructions in docs/plan-format.md.
//
// Member pointers serve where other projects have an X-macro or a generator:
// the struct stays plain C++ that debuggers and editors understand, and
// building the runtime needs no LLVM tool.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_PLAN_FIELDS_H
#define FSDP_PLAN_FIELDS_H

#include <cstdint>
#include <functional>
#include <limits>
#include <tuple>
#include <type_traits>

namespace fsdp::plan {

/// What is special about a field's contents.
enum class Role : uint8_t {
  Plain,
  Operand, ///< values that the instruction reads
  Mutated, ///< operands that it writes in place
  Result,  ///< values that it defines; -1: not used
  Unit,    ///< an index into Plan::units, and so on
  Param,
  Buffer,
  Kernel,
  Hex,   ///< bytes, written in hex digits
  Text,  ///< for people; not empty if it is present
  Steps, ///< instructions that each have a phase
};

/// One field. `access` is a pointer to the member, or a function from the
/// struct to a reference. An optional field is left out of the JSON form if it
/// has the value that a new struct has; a field with an empty key is itself a
/// struct, whose fields appear among those of the struct that contains it.
template <typename AccessT, bool kIsOptional> struct Field {
  static constexpr bool isOptional = kIsOptional;
  const char *key;
  AccessT access;
  Role role = Role::Plain;
  /// The bounds of integers that are not indices.
  int64_t least = std::numeric_limits<int64_t>::min();
  int64_t most = std::numeric_limits<int64_t>::max();

  bool isInlined() const { return !*key; }
  template <typename StructT> auto &in(StructT &object) const {
    return std::invoke(access, object);
  }
  constexpr Field atLeast(int64_t bound) const { return within(bound, most); }
  constexpr Field within(int64_t low, int64_t high) const {
    Field field = *this;
    field.least = low;
    field.most = high;
    return field;
  }
};

template <typename AccessT>
constexpr Field<AccessT, false> field(const char *key, AccessT access,
                                      Role role = Role::Plain) {
  return {key, access, role};
}
template <typename AccessT>
constexpr Field<AccessT, true> optionalField(const char *key, AccessT access,
                                             Role role = Role::Plain) {
  return {key, access, role};
}

/// Access to a base of a struct.
template <typename BaseT>
inline constexpr auto asBase = [](auto &object) -> auto & {
  using Object = std::remove_reference_t<decltype(object)>;
  return static_cast<
      std::conditional_t<std::is_const_v<Object>, const BaseT, BaseT> &>(
      object);
};

template <typename StructT>
concept HasFields = requires { StructT::fields(); };

/// Calls `fn` with each field of a struct, in order.
template <HasFields StructT, typename FnT> void forEachField(FnT &&fn) {
  std::apply([&](const auto &...field) { (fn(field), ...); },
             StructT::fields());
}

} // namespace fsdp::plan

#endif // FSDP_PLAN_FIELDS_H
