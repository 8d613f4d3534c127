// The outcome of an operation: an errno, and separately the error code of the device's runtime.
// Ownership: a value type.
// Not shared between threads without a lock.
#pragma once

#include <string>
#include <utility>
#include <variant>

namespace gpufs {

// error: 0 on success, otherwise a positive errno, for the caller to act on. device_code: the vendor runtime's own
// code, for the operator; 0 if the failure did not come from it.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(int error, std::string message, int device_code = 0)
      : error_(error), device_code_(device_code), message_(std::move(message)) {}

  // The failure of a system call. The text is "what: strerror(error)".
  static Status from_errno(int error, const std::string& what);

  [[nodiscard]] bool ok() const { return error_ == 0; }
  [[nodiscard]] int error() const { return error_; }
  [[nodiscard]] int device_code() const { return device_code_; }
  [[nodiscard]] const std::string& message() const { return message_; }

  // The same failure with the text "context: message". No effect on success.
  [[nodiscard]] Status with_context(const std::string& context) const;

  // As a Result without a value, for TRY().
  [[nodiscard]] const Status& status() const { return *this; }
  void take() const {}

 private:
  int error_ = 0;
  int device_code_ = 0;
  std::string message_;
};

// A value, or the Status of the failure (never one that is ok()).
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}         // NOLINT: implicit by intent
  Result(Status status) : state_(std::in_place_index<1>, std::move(status)) {}  // NOLINT: implicit by intent

  [[nodiscard]] bool ok() const { return state_.index() == 0; }
  [[nodiscard]] T& value() { return *std::get_if<0>(&state_); }
  [[nodiscard]] const T& value() const { return *std::get_if<0>(&state_); }
  [[nodiscard]] T take() { return std::move(*std::get_if<0>(&state_)); }
  [[nodiscard]] Status status() const { return ok() ? Status{} : *std::get_if<1>(&state_); }
  [[nodiscard]] int error() const { return ok() ? 0 : std::get_if<1>(&state_)->error(); }

 private:
  std::variant<T, Status> state_;
};

}  // namespace gpufs

// The value of a Result; nothing of a Status. A failure is returned from the function that this stands in. Only as a
// whole statement, or an initial or assigned value: temporaries of a larger expression would not be destroyed.
#define TRY(...)                                        \
  __extension__({                                       \
    auto&& try_outcome = (__VA_ARGS__);                 \
    if (!try_outcome.ok()) return try_outcome.status(); \
    try_outcome.take();                                 \
  })
