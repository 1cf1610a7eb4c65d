//! A file tree as one tar layer. Owns reproducibility: order from the tree, times zero, owner root, no names of users.

use std::io;

use tar::{Builder, EntryType, Header};

use crate::{Entry, RootFs};

/// Packs the tree. The same tree gives the same bytes.
pub(crate) fn pack(tree: &RootFs) -> io::Result<Vec<u8>> {
    let mut tar = Builder::new(Vec::new());
    for (path, entry) in tree.entries() {
        append(&mut tar, path, entry)?;
    }
    tar.into_inner()
}

fn append(tar: &mut Builder<Vec<u8>>, path: &str, entry: &Entry) -> io::Result<()> {
    match entry {
        Entry::Directory { mode } => {
            let mut header = header(EntryType::Directory, *mode, 0);
            tar.append_data(&mut header, format!("{path}/"), io::empty())
        }
        Entry::File { mode, bytes } => {
            let mut header = header(EntryType::Regular, *mode, bytes.len() as u64);
            tar.append_data(&mut header, path, bytes.as_slice())
        }
        Entry::Link { target } => {
            let mut header = header(EntryType::Symlink, 0o777, 0);
            tar.append_link(&mut header, path, target)
        }
    }
}

/// A header that holds nothing of this machine or this moment.
pub(crate) fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}
