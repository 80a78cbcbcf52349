//! What the allocator is asked for besides memory.

/// Gives freed memory back to the system. glibc does that by itself only for what lies at the end of its heap, and small
/// tables rarely do.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: it has no preconditions, and may be called from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}
