#pragma once

// Stacks that take turns on one host thread.

#include <cstddef>

namespace trtllm_kvmap::emulator
{

struct Fiber
{
    void* stackPointer { nullptr }; //!< while it does not run
    unsigned char* stack { nullptr };
    std::size_t stackBytes { 0 };
    void* asanFakeStack { nullptr };
    void* tsanFiber { nullptr };
};

//! Bytes of stack a fiber gets: more under a sanitizer, whose frames are larger.
std::size_t fiberStackBytes();

//! Make \p fiber stand for the host thread's own stack, so that others can switch back to it.
void adoptHostStack(Fiber& fiber);

//! Make \p fiber start \p entry on its stack at the next switch to it. \p entry must never return and must call
//! arrivedOnFiber first. \p stagger shifts the first frame, so that the hot frames of many fibers spread over the
//! cache.
void prepareFiber(Fiber& fiber, void (*entry)(), std::size_t stagger);

void arrivedOnFiber();

//! Continue \p to; returns when somebody switches back to \p from. \p fromEnds: nobody will.
void switchFiber(Fiber& from, Fiber& to, bool fromEnds);

//! Forget a fiber that has ended or is given up. TSan's record of it is kept for a while: it gives the numbers of
//! forgotten fibers to new ones, and would take what both did to global memory for the work of one.
void discardFiber(Fiber& fiber);

} // namespace trtllm_kvmap::emulator
