//! How much of a file is in this machine's memory, by the kernel's word.

use std::{fs::File, io, path::Path};

use memmap2::Mmap;
use rustix::fs::{Advice, fadvise};

/// The smallest that Linux has; a kernel with larger ones says each of them several times.
const PAGE_BYTES: usize = 4096;

/// Bytes of the file that are in memory, in whole pages, and those of all its pages.
pub fn in_memory(path: &Path) -> io::Result<(usize, usize)> {
    // SAFETY: the map is read-only and no byte of it is looked at.
    let map = unsafe { Mmap::map(&File::open(path)?)? };
    let mut pages = vec![0_u8; map.len().div_ceil(PAGE_BYTES)];
    // SAFETY: the range is that of the map, which is live, and there is a byte for each of its pages.
    let told = unsafe { libc::mincore(map.as_ptr().cast_mut().cast(), map.len(), pages.as_mut_ptr()) };
    if told != 0 {
        return Err(io::Error::last_os_error());
    }
    let there = pages.iter().filter(|page| **page & 1 == 1).count();
    Ok((there * PAGE_BYTES, pages.len() * PAGE_BYTES))
}

/// Asks the kernel to take the file out of memory; it keeps what somebody has mapped or locked.
pub fn let_go(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    // What is not written yet stays.
    file.sync_all()?;
    Ok(fadvise(&file, 0, None, Advice::DontNeed)?)
}
