//! The shared libraries that a binary needs, as the dynamic loader of this machine finds them. Owns the reading of
//! `ldd`; never decides where they go in the image.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use crate::ImageError;

/// Asks the loader for every library that `binary` needs, the loader itself included. Empty for a static binary.
pub(crate) fn libraries_of(binary: &Path) -> Result<Vec<PathBuf>, ImageError> {
    let output = Command::new("ldd").arg(binary).env("LC_ALL", "C").output().map_err(ImageError::io("ldd"))?;
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    // ldd exits 1 for a static binary, and says so on either stream, depending on its version.
    if [&stdout, &stderr].iter().any(|s| s.contains("not a dynamic executable") || s.contains("statically linked")) {
        return Ok(Vec::new());
    }
    if !output.status.success() {
        return Err(ImageError::Ldd { binary: binary.to_owned(), reason: stderr.trim().to_owned() });
    }
    stdout.lines().filter_map(|line| library_in(line, binary).transpose()).collect()
}

/// Reads one line of `ldd`:
/// ```text
/// linux-vdso.so.1 (0x00007ffc5a5fe000)                                  the kernel's, no file
/// libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f1c8a000000)     a library
/// libmissing.so => not found
/// /lib64/ld-linux-x86-64.so.2 (0x00007f1c8a3f6000)                      the loader
/// ```
fn library_in(line: &str, binary: &Path) -> Result<Option<PathBuf>, ImageError> {
    let line = line.trim();
    let (name, found) = line.split_once(" => ").unwrap_or((line, line));
    if found.starts_with("not found") {
        return Err(ImageError::MissingLibrary { binary: binary.to_owned(), library: name.to_owned() });
    }
    let path = found.split(" (").next().unwrap_or(found);
    Ok(path.starts_with('/').then(|| PathBuf::from(path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Option<PathBuf>, ImageError> {
        library_in(line, Path::new("/bin/x"))
    }

    #[test]
    fn libraries_and_the_loader_are_files_and_the_vdso_is_not() {
        assert_eq!(read("\tlibc.so.6 => /lib/libc.so.6 (0x7f)").unwrap(), Some("/lib/libc.so.6".into()));
        assert_eq!(read("\t/lib64/ld-linux.so.2 (0x7f)").unwrap(), Some("/lib64/ld-linux.so.2".into()));
        assert_eq!(read("\tlinux-vdso.so.1 (0x7f)").unwrap(), None);
    }

    #[test]
    fn a_library_that_is_absent_is_named_with_the_binary_that_needs_it() {
        let error = read("\tlibnccl.so.2 => not found").unwrap_err();
        assert_eq!(error.to_string(), "/bin/x needs libnccl.so.2, which this machine does not have");
    }
}
