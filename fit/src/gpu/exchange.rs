//! What the GPUs of a tensor-parallel group share.

/// Rows up to which a sum pushes them in words: above, bytes cost more than waiting.
const WORDS_ROWS_MAX: usize = 32;
/// The same in lines, which are hardly more bytes than the rows.
const LINES_ROWS_MAX: usize = 256;
/// Blocks of a row of logits; the same constant as in the kernels' `csrc/reduce.cu`.
pub const LOGIT_CHUNKS: usize = 8;
/// Units of 8 bytes in a line; the same constant as in the kernels' `csrc/reduce.cuh`.
pub const LINE_UNITS: usize = 15;
/// Threads that move a line; the same constant as in the kernels' `csrc/reduce.cuh`.
pub const LINE_THREADS: usize = 8;

/// How rows are pushed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Push {
    /// Over any link: a number beside every four bytes. A row's norm is summed in the order of all other rows', however many there are.
    Words,
    /// Over NVLink: a number in every line of 128 bytes.
    Lines,
}

impl Push {
    /// Rows that are pushed at most.
    pub fn max_rows(self) -> usize {
        match self {
            Self::Words => WORDS_ROWS_MAX,
            Self::Lines => LINES_ROWS_MAX,
        }
    }

    /// Lines of a row of that width.
    pub fn n_lines(width: usize) -> usize {
        (width / 4).div_ceil(LINE_UNITS)
    }

    /// Bytes that a row takes in an inbox.
    pub fn row_bytes(self, width: usize) -> usize {
        match self {
            Self::Words => 4 * width,
            Self::Lines => Self::n_lines(width) * LINE_THREADS * 16,
        }
    }
}

/// What is counted on the device, a count for each row or block.
#[derive(Clone, Copy, Debug)]
pub enum Counted {
    /// Sums that were pushed.
    Pushed,
    /// Sums that were pulled.
    Pulled,
    /// Logits.
    Logits,
    /// Draws.
    Draws,
}

/// What the shared memory of a rank has room for.
#[derive(Clone, Copy, Debug)]
pub struct ExchangeSize {
    /// Ranks of the group.
    pub n_ranks: usize,
    /// How few rows go to the others.
    pub push: Push,
    /// Rows of a sum at most.
    pub max_rows: usize,
    /// Values of each.
    pub width: usize,
    /// Rows of logits at most.
    pub max_logit_rows: usize,
    /// Logits of a row that a rank computes at most.
    pub logit_share: usize,
}

impl ExchangeSize {
    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        4 * self.max_rows * self.width
            + self.inbox_bytes()
            + 16 * self.n_bests()
            + 4 * self.max_logit_rows * self.logit_share
            + 4 * self.n_ranks * (self.max_rows + self.max_logit_rows * LOGIT_CHUNKS)
            + 4 * self.n_counts()
    }

    /// Two inboxes with room for each rank.
    pub fn inbox_bytes(&self) -> usize {
        2 * self.n_ranks * self.push.max_rows() * self.push.row_bytes(self.width)
    }

    /// The same for the best tokens of rows.
    pub fn n_bests(&self) -> usize {
        2 * self.n_ranks * self.max_logit_rows
    }

    /// Counts of sums and draws.
    pub fn n_counts(&self) -> usize {
        self.first_count(Counted::Draws) + self.max_logit_rows
    }

    /// Where the counts of what has been summed lie.
    pub fn first_count(&self, counted: Counted) -> usize {
        let (pulled, logits) = (self.push.max_rows(), self.push.max_rows() + self.max_rows);
        match counted {
            Counted::Pushed => 0,
            Counted::Pulled => pulled,
            Counted::Logits => logits,
            Counted::Draws => logits + self.max_logit_rows * LOGIT_CHUNKS,
        }
    }
}
