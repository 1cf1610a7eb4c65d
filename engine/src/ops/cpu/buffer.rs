//! Memory of activations, kept from one tensor to the next. What the system hands out anew is paged in and zeroed while threads wait for it: a
//! fifth of a prompt's time, as soon as an allocator gives memory back that the next operation asks for.

use std::{
    cell::RefCell,
    fmt,
    marker::PhantomData,
    mem,
    ops::{Deref, DerefMut},
};

use bytemuck::Pod;

/// A cache line, so that no step of a row lies in two.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(super) struct Line(pub(super) [u8; 64]);

/// Buffers that a thread keeps at most: more than a layer has at a time.
const MAX_KEPT: usize = 16;

thread_local! {
    /// Those that were dropped, the newest last.
    static KEPT: RefCell<Vec<Vec<Line>>> = const { RefCell::new(Vec::new()) };
}

/// Numbers, the first of which begins a cache line.
pub struct Buffer<T> {
    /// At least as many as the numbers need.
    lines: Vec<Line>,
    len: usize,
    of: PhantomData<T>,
}

impl<T: Pod> Buffer<T> {
    /// `len` numbers to be written before they are read: what was in the memory before, or, in builds with assertions, NaN.
    pub(super) fn unwritten(len: usize) -> Self {
        let n_lines = (len * size_of::<T>()).div_ceil(size_of::<Line>());
        let mut lines = kept(n_lines).unwrap_or_else(|| vec![Line([0; 64]); n_lines]);
        if cfg!(debug_assertions) {
            lines[..n_lines].fill(Line([0xFF; 64]));
        }
        Self { lines, len, of: PhantomData }
    }

    /// `len` zeros.
    pub(super) fn zeros(len: usize) -> Self {
        let mut zeros = Self::unwritten(len);
        zeros.fill(T::zeroed());
        zeros
    }
}

/// The smallest of the kept that has so many lines. Where none has, the largest goes instead, so that a thread has no more of them than it had
/// tensors at a time.
fn kept(n_lines: usize) -> Option<Vec<Line>> {
    KEPT.with_borrow_mut(|kept| {
        let by_size = |idx: &usize| kept[*idx].len();
        let fit = (0..kept.len()).rev().filter(|idx| kept[*idx].len() >= n_lines).min_by_key(by_size);
        if fit.is_none() {
            let largest = (0..kept.len()).max_by_key(by_size);
            largest.map(|idx| kept.remove(idx));
        }
        fit.map(|idx| kept.remove(idx))
    })
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        let lines = mem::take(&mut self.lines);
        // A thread that ends keeps nothing.
        let _ = KEPT.try_with(|kept| {
            let mut kept = kept.borrow_mut();
            if kept.len() < MAX_KEPT && !lines.is_empty() {
                kept.push(lines);
            }
        });
    }
}

impl<T: Pod> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let bytes: &[u8] = bytemuck::cast_slice(&self.lines);
        bytemuck::cast_slice(&bytes[..self.len * size_of::<T>()])
    }
}

impl<T: Pod> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.lines);
        bytemuck::cast_slice_mut(&mut bytes[..self.len * size_of::<T>()])
    }
}

impl<T> Default for Buffer<T> {
    /// No numbers.
    fn default() -> Self {
        Self { lines: Vec::new(), len: 0, of: PhantomData }
    }
}

impl<T: Pod> From<&[T]> for Buffer<T> {
    fn from(values: &[T]) -> Self {
        let mut buffer = Self::unwritten(values.len());
        buffer.copy_from_slice(values);
        buffer
    }
}

impl<T: Pod> FromIterator<T> for Buffer<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Self {
        Self::from(&Vec::from_iter(values)[..])
    }
}

impl<T: Pod> Clone for Buffer<T> {
    fn clone(&self) -> Self {
        Self::from(&self[..])
    }
}

impl<T: Pod + PartialEq> PartialEq for Buffer<T> {
    fn eq(&self, other: &Self) -> bool {
        self[..] == other[..]
    }
}

impl<T: Pod + fmt::Debug> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self[..].fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(buffer: &Buffer<f32>) -> *const f32 {
        buffer.as_ptr()
    }

    #[test]
    fn memory_goes_from_one_to_the_next_that_fits_it_best() {
        let (large, small) = (Buffer::<f32>::zeros(1000), Buffer::<f32>::zeros(100));
        let (at_large, at_small) = (place(&large), place(&small));
        drop((large, small));
        let (first, second) = (Buffer::<f32>::zeros(90), Buffer::<f32>::zeros(90));
        assert_eq!((place(&first), place(&second)), (at_small, at_large));
        assert_eq!((first.len(), second[89]), (90, 0.0));
    }

    #[test]
    fn what_grows_keeps_no_more_buffers_than_there_were_at_a_time() {
        for len in 1..50 {
            let _pair = [Buffer::<f32>::zeros(100 * len), Buffer::<f32>::zeros(100 * len)];
        }
        assert_eq!(KEPT.with_borrow(Vec::len), 2);
        for _ in 0..3 {
            let _many: Vec<_> = (0..2 * MAX_KEPT).map(|_| Buffer::<f32>::zeros(7)).collect();
        }
        assert_eq!(KEPT.with_borrow(Vec::len), MAX_KEPT);
    }

    #[test]
    fn numbers_are_those_that_were_put_in() {
        let numbers: Vec<f32> = (0..37).map(|i| i as f32).collect();
        let buffer = Buffer::from(&numbers[..]);
        assert_eq!(buffer[..], numbers);
        assert_eq!(buffer, numbers.iter().copied().collect());
        assert!(place(&buffer).addr().is_multiple_of(64));
        if cfg!(debug_assertions) {
            drop(buffer);
            assert!(Buffer::<f32>::unwritten(5).iter().all(|number| number.is_nan()), "nobody reads what was there");
        }
    }
}
