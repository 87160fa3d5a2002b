#include "emulator/fiber.h"

#include "emulator/sanitizer.h"

#include <pthread.h>

#include <deque>

#if !defined(__x86_64__)
#error "The emulator switches stacks in x86-64 assembly; this machine needs its own switchStack."
#endif

namespace trtllm_kvmap::emulator
{

namespace
{

constexpr std::size_t kPLAIN_STACK = 64 << 10;
constexpr std::size_t kSANITIZED_STACK = 256 << 10;

//! Save what the System V ABI lets a callee keep, on the stack left behind, and take the same from the stack \p next.
__attribute__((naked, noinline)) void switchStack(void** /*saved*/, void* /*next*/)
{
    asm volatile("pushq %rbp\n"
                 "pushq %rbx\n"
                 "pushq %r12\n"
                 "pushq %r13\n"
                 "pushq %r14\n"
                 "pushq %r15\n"
                 "movq %rsp, (%rdi)\n"
                 "movq %rsi, %rsp\n"
                 "popq %r15\n"
                 "popq %r14\n"
                 "popq %r13\n"
                 "popq %r12\n"
                 "popq %rbx\n"
                 "popq %rbp\n"
                 "ret\n");
}

constexpr int kSAVED_REGISTERS = 6;

} // namespace

std::size_t fiberStackBytes()
{
    return underAsan() || underTsan() ? kSANITIZED_STACK : kPLAIN_STACK;
}

void adoptHostStack(Fiber& fiber)
{
    if (underAsan())
    {
        pthread_attr_t attributes;
        void* bottom = nullptr;
        pthread_getattr_np(pthread_self(), &attributes);
        pthread_attr_getstack(&attributes, &bottom, &fiber.stackBytes);
        pthread_attr_destroy(&attributes);
        fiber.stack = static_cast<unsigned char*>(bottom);
    }
    if (underTsan())
    {
        fiber.tsanFiber = __tsan_get_current_fiber();
    }
}

void prepareFiber(Fiber& fiber, void (*entry)(), std::size_t stagger)
{
    if (underAsan())
    {
        __asan_unpoison_memory_region(fiber.stack, fiber.stackBytes);
    }
    if (underTsan())
    {
        fiber.tsanFiber = __tsan_create_fiber(0);
    }
    // As after a call: the return address (none) on top, so that the frame has the alignment the ABI promises.
    auto** frame = reinterpret_cast<void**>(fiber.stack + fiber.stackBytes - 64 - stagger / 16 * 16);
    *--frame = nullptr;
    *--frame = reinterpret_cast<void*>(entry);
    for (int i = 0; i < kSAVED_REGISTERS; ++i)
    {
        *--frame = nullptr;
    }
    fiber.stackPointer = frame;
    fiber.asanFakeStack = nullptr;
}

void arrivedOnFiber()
{
    if (__sanitizer_finish_switch_fiber != nullptr && underAsan())
    {
        __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
    }
}

void switchFiber(Fiber& from, Fiber& to, bool fromEnds)
{
    if (underAsan())
    {
        __sanitizer_start_switch_fiber(fromEnds ? nullptr : &from.asanFakeStack, to.stack, to.stackBytes);
    }
    if (underTsan())
    {
        constexpr unsigned kNO_SYNCHRONISATION = 1;
        __tsan_switch_to_fiber(to.tsanFiber, kNO_SYNCHRONISATION);
    }
    switchStack(&from.stackPointer, to.stackPointer);
    if (underAsan())
    {
        __sanitizer_finish_switch_fiber(from.asanFakeStack, nullptr, nullptr);
    }
}

void discardFiber(Fiber& fiber)
{
    if (fiber.tsanFiber == nullptr)
    {
        return;
    }
    constexpr std::size_t kKEPT = 4096; // TSan has room for some 8,000
    static thread_local std::deque<void*> tKept;
    tKept.push_back(fiber.tsanFiber);
    fiber.tsanFiber = nullptr;
    if (tKept.size() > kKEPT)
    {
        __tsan_destroy_fiber(tKept.front());
        tKept.pop_front();
    }
}

} // namespace trtllm_kvmap::emulator
