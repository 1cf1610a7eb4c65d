//! Pictures of pages, small enough to keep beside the docs: PNGs of at most 256 colours.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use png::{BitDepth, ColorType, Compression, Decoder, Encoder, Filter, Transformations};

const PALETTE: usize = 256;
/// Colours that are kept however alike they are: those of grounds are, and are meant to differ.
const MOST_FREQUENT: usize = 24;
/// Squared distance below which two colours are the same to an eye.
const ALIKE: u32 = 3 * 10 * 10;

type Rgb = [u8; 3];

/// The same picture in its most frequent colours and those that are not like them, however rare: a page has few, and of what is between
/// them an eye misses none.
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
    let palette = palette_of(&pixels);
    write(frame.width, frame.height, &palette, &indices(&pixels, &palette))
}

fn palette_of(pixels: &[Rgb]) -> Vec<Rgb> {
    let mut seen: HashMap<Rgb, usize> = HashMap::new();
    pixels.iter().for_each(|&px| *seen.entry(px).or_default() += 1);
    let mut colours: Vec<(Rgb, usize)> = seen.into_iter().collect();
    colours.sort_by_key(|&(colour, times)| (std::cmp::Reverse(times), colour));
    let mut palette: Vec<Rgb> = Vec::new();
    for (colour, _) in colours {
        let is_like_none = || palette.iter().all(|&kept| distance(colour, kept) >= ALIKE);
        if palette.len() < MOST_FREQUENT || palette.len() < PALETTE && is_like_none() {
            palette.push(colour);
        }
    }
    palette
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
    // Neighbours of an index mean nothing.
    encoder.set_filter(Filter::NoFilter);
    encoder.write_header()?.write_image_data(indices)?;
    Ok(png)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rare_colour_is_kept_and_a_rare_shade_becomes_the_nearest() {
        let frequent: Vec<Rgb> = (0..=255).flat_map(|grey| [[grey; 3]; 2]).collect();
        let pixels = [frequent, vec![[10, 11, 10], [186, 83, 16]]].concat();
        let palette = palette_of(&pixels);
        assert!(palette.len() < MOST_FREQUENT + 30, "{palette:?}");
        let drawn: Vec<Rgb> = indices(&pixels, &palette).into_iter().map(|idx| palette[usize::from(idx)]).collect();
        assert_eq!(drawn[pixels.len() - 1], [186, 83, 16]);
        assert!(distance(drawn[pixels.len() - 2], [10; 3]) < ALIKE);
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
