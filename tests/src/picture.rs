//! Pictures of pages, small enough to keep beside the docs: PNGs of at most 256 colours.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use png::{BitDepth, ColorType, Compression, Decoder, Encoder, Transformations};

const PALETTE: usize = 256;

type Rgb = [u8; 3];

/// The same picture in its 256 most frequent colours: a page has few, and of what is between them an eye misses none.
pub(crate) fn with_palette(png: &[u8]) -> Result<Vec<u8>> {
    let mut decoder = Decoder::new(std::io::Cursor::new(png));
    decoder.set_transformations(Transformations::normalize_to_color8());
    let mut reader = decoder.read_info()?;
    let mut pixels = vec![0; reader.output_buffer_size().context("a picture that fits memory")?];
    let frame = reader.next_frame(&mut pixels)?;
    let width = match frame.color_type {
        ColorType::Rgb => 3,
        ColorType::Rgba => 4,
        other => anyhow::bail!("a screenshot is not {other:?}"),
    };
    let pixels: Vec<Rgb> = pixels[..frame.buffer_size()].chunks_exact(width).map(|px| [px[0], px[1], px[2]]).collect();
    ensure!(!pixels.is_empty(), "an empty picture");
    let palette = most_frequent(&pixels);
    write(frame.width, frame.height, &palette, &indices(&pixels, &palette))
}

fn most_frequent(pixels: &[Rgb]) -> Vec<Rgb> {
    let mut seen: HashMap<Rgb, usize> = HashMap::new();
    pixels.iter().for_each(|&px| *seen.entry(px).or_default() += 1);
    let mut colours: Vec<(Rgb, usize)> = seen.into_iter().collect();
    colours.sort_by_key(|&(colour, times)| (std::cmp::Reverse(times), colour));
    colours.into_iter().take(PALETTE).map(|(colour, _)| colour).collect()
}

fn indices(pixels: &[Rgb], palette: &[Rgb]) -> Vec<u8> {
    let mut nearest: HashMap<Rgb, u8> = HashMap::new();
    let find =
        |px: Rgb| (0..=u8::MAX).zip(palette).min_by_key(|&(_, &colour)| distance(px, colour)).map_or(0, |it| it.0);
    pixels.iter().map(|&px| *nearest.entry(px).or_insert_with(|| find(px))).collect()
}

fn distance(a: Rgb, b: Rgb) -> u32 {
    a.iter().zip(b).map(|(&a, b)| u32::from(a.abs_diff(b)).pow(2)).sum()
}

fn write(width: u32, height: u32, palette: &[Rgb], indices: &[u8]) -> Result<Vec<u8>> {
    let mut png = Vec::new();
    let mut encoder = Encoder::new(&mut png, width, height);
    encoder.set_color(ColorType::Indexed);
    encoder.set_depth(BitDepth::Eight);
    encoder.set_palette(palette.concat());
    encoder.set_compression(Compression::High);
    encoder.write_header()?.write_image_data(indices)?;
    Ok(png)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rare_colours_become_the_nearest_that_are_kept() {
        let frequent: Vec<Rgb> = (0..=255).flat_map(|grey| [[grey; 3]; 2]).collect();
        let pixels = [frequent, vec![[10, 11, 10]]].concat();
        let palette = most_frequent(&pixels);
        assert_eq!(palette.len(), PALETTE);
        let last = *indices(&pixels, &palette).last().unwrap();
        assert_eq!(palette[usize::from(last)], [10; 3]);
    }

    #[test]
    fn a_picture_of_few_colours_is_the_same_one() {
        let palette = [[0, 0, 0], [200, 10, 30]];
        let png = write(2, 2, &palette, &[0, 1, 1, 0]).unwrap();
        let again = with_palette(&png).unwrap();
        let mut reader = Decoder::new(std::io::Cursor::new(again)).read_info().unwrap();
        let mut drawn = vec![0; 4];
        reader.next_frame(&mut drawn).unwrap();
        assert_eq!(drawn, [0, 1, 1, 0]);
    }
}
