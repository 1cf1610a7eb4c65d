//! Codes of four bits in words as checkpoints hold them: three orders, and what a word's eight codes are of. The reference of
//! `csrc/repack_int4.cu`. Copies nothing.

use std::ops::Range;

/// Codes of a word.
pub const FOURS: usize = 8;
/// Bytes of a word.
pub const WORD_BYTES: usize = 4;

/// How codes share words, and words lie.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum CodeOrder {
    /// A line an output, eight inputs a word, the first one lowest: compressed-tensors.
    Packed,
    /// A line for eight inputs, a word an output, the first input lowest: GPTQ.
    Gptq,
    /// A line an input, eight outputs a word, of which 0 2 4 6 1 3 5 7 are lowest first: AWQ.
    Awq,
}

/// The words that hold a share of a matrix of codes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CodeWords<'a> {
    /// How they lie.
    pub order: CodeOrder,
    /// Outputs and inputs of the share.
    pub shape: [usize; 2],
    /// From the first word of the share's first line on.
    pub bytes: &'a [u8],
    /// Words from a line to the next.
    pub stride: usize,
    /// Lines of the share.
    pub n_lines: usize,
    /// Words of each that hold codes of the share.
    pub line_words: usize,
    /// Codes that are not the share's in the first word of a line; of GPTQ in each word of the first line.
    pub n_skipped: usize,
}

impl<'a> CodeWords<'a> {
    /// Those of some outputs and inputs of a whole tensor, whose shape is outputs and inputs.
    pub fn of(order: CodeOrder, bytes: &'a [u8], shape: [usize; 2], [outputs, inputs]: [Range<usize>; 2]) -> Self {
        let words_of = |codes: &Range<usize>| codes.start / FOURS..codes.end.div_ceil(FOURS);
        let (lines, words, stride, first) = match order {
            CodeOrder::Packed => (outputs.clone(), words_of(&inputs), shape[1].div_ceil(FOURS), inputs.start),
            CodeOrder::Gptq => (words_of(&inputs), outputs.clone(), shape[0], inputs.start),
            CodeOrder::Awq => (inputs.clone(), words_of(&outputs), shape[0].div_ceil(FOURS), outputs.start),
        };
        Self {
            order,
            shape: [outputs.len(), inputs.len()],
            bytes: &bytes[(lines.start * stride + words.start) * WORD_BYTES..],
            stride,
            n_lines: lines.len(),
            line_words: words.len(),
            n_skipped: first % FOURS,
        }
    }

    /// The share's words of some lines, in as few runs as there are.
    pub fn runs(&self, lines: Range<usize>) -> Vec<&'a [u8]> {
        let run = |line: usize, n_words: usize| &self.bytes[line * self.stride * WORD_BYTES..][..n_words * WORD_BYTES];
        match self.stride == self.line_words {
            true => vec![run(lines.start, lines.len() * self.line_words)],
            false => lines.map(|line| run(line, self.line_words)).collect(),
        }
    }

    /// The code of one output and input.
    pub fn code(&self, output: usize, input: usize) -> u8 {
        let along = self.n_skipped + if self.order == CodeOrder::Awq { output } else { input };
        let (line, word) = match self.order {
            CodeOrder::Packed => (output, along / FOURS),
            CodeOrder::Gptq => (along / FOURS, output),
            CodeOrder::Awq => (input, along / FOURS),
        };
        let place = if self.order == CodeOrder::Awq { place_of_awq(along) } else { along % FOURS };
        let byte = self.bytes[(line * self.stride + word) * WORD_BYTES + place / 2];
        byte >> (place % 2 * 4) & 15
    }

    /// All codes, output by output.
    pub fn codes(&self) -> Vec<u8> {
        let [n_outputs, n_inputs] = self.shape;
        (0..n_outputs).flat_map(|output| (0..n_inputs).map(move |input| self.code(output, input))).collect()
    }
}

/// The place of an output in a word of AWQ.
pub fn place_of_awq(output: usize) -> usize {
    output % 8 / 2 + output % 2 * 4
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(order: CodeOrder, words: &[u32], shape: [usize; 2], share: [Range<usize>; 2]) -> Vec<u8> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        CodeWords::of(order, &bytes, shape, share).codes()
    }

    #[test]
    fn a_code_is_where_its_library_puts_it() {
        let four = [0x7654_3210, 0, 0xfedc_ba98, 0];
        let found = share(CodeOrder::Packed, &four, [2, 16], [0..2, 2..8]);
        assert_eq!(found, [2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15]);
        // Outputs 2 to 7 are at places 1 5 2 6 3 7.
        let found = share(CodeOrder::Awq, &four, [16, 2], [2..8, 0..2]);
        assert_eq!(found, [1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15]);
        let lines: Vec<u32> = [0, 0x100].into_iter().flat_map(|line| (0..3).map(move |n| line + n * 0x11)).collect();
        // Inputs 1 to 9 of outputs 1 and 2.
        let found = share(CodeOrder::Gptq, &lines, [3, 16], [1..3, 1..10]);
        assert_eq!(found, [1, 0, 0, 0, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 0, 0, 2, 2]);
        let found = share(CodeOrder::Gptq, &lines, [3, 16], [2..3, 10..11]);
        assert_eq!(found, [1]);
    }

    #[test]
    fn lines_without_a_gap_are_one_run() {
        let bytes: Vec<u8> = (0..16).collect();
        let words = |shape, inputs| CodeWords::of(CodeOrder::Packed, &bytes, shape, [0..2, inputs]);
        assert_eq!(words([4, 8], 0..6).runs(0..2), [&bytes[..8]]);
        assert_eq!(words([2, 16], 0..6).runs(0..2), [&bytes[..4], &bytes[8..12]]);
        assert_eq!(words([2, 16], 9..16).runs(1..2), [&bytes[12..]]);
    }
}
