//! A device's memory pool, as facts, as text and as a picture.

use std::fmt::Write;

use serde_json::{Value, json};
use warpforge::PoolMap;

use crate::table::table;

/// Cells of a line of text, and lines.
const CELLS: (usize, usize) = (64, 12);

/// Width and height of a line of the picture, and lines.
const STRIPES: (f64, f64, usize) = (1024.0, 14.0, 24);

/// What the pool holds and did.
pub fn facts(map: &PoolMap) -> Value {
    let stats = &map.stats;
    let sizes = map.sizes();
    let sizes =
        sizes.iter().map(|size| json!({"bytes": size.bytes, "live": size.num_live, "free": size.num_free}));
    let segments = map.segments.iter().map(|segment| {
        let pieces = segment.pieces.iter().map(|piece| json!({"bytes": piece.bytes, "live": piece.is_live}));
        let pieces: Vec<Value> = pieces.collect();
        json!({"address": segment.address, "bytes": segment.bytes, "pieces": pieces})
    });
    json!({
        "requested_bytes": stats.requested_bytes,
        "in_use_bytes": stats.in_use_bytes,
        "reserved_bytes": stats.reserved_bytes,
        "peak_in_use_bytes": stats.peak_in_use_bytes,
        "peak_reserved_bytes": stats.peak_reserved_bytes,
        "largest_free_bytes": stats.largest_free_bytes,
        "live": stats.num_live,
        "allocations": stats.num_allocations,
        "reuse_rate": stats.reuse_rate(),
        "fragmentation": stats.fragmentation(),
        "sizes": sizes.collect::<Vec<_>>(),
        "segments": segments.collect::<Vec<_>>(),
    })
}

/// Numbers, a map of cells in the order of addresses, and pieces by size.
pub fn text(map: &PoolMap) -> String {
    let stats = &map.stats;
    let columns = [
        ("requested_bytes", "requested"),
        ("in_use_bytes", "in use"),
        ("peak_in_use_bytes", "at most"),
        ("reserved_bytes", "reserved"),
        ("peak_reserved_bytes", "at most"),
        ("largest_free_bytes", "largest free"),
    ];
    let mut text = table(&[facts(map)], &columns);
    let _ = writeln!(
        text,
        "  {} tensors live; {:.0} % of {} allocations reused memory; fragmentation {:.2}",
        stats.num_live,
        100.0 * stats.reuse_rate(),
        stats.num_allocations,
        stats.fragmentation()
    );
    let (bytes, cells) = cells(map);
    if !cells.is_empty() {
        let _ = writeln!(text, "  a cell is {bytes} bytes: # live, + in part, . free");
        for line in cells.chunks(CELLS.0) {
            let _ = writeln!(text, "  {}", line.iter().collect::<String>());
        }
        let sizes = facts(map)["sizes"].as_array().cloned().unwrap_or_default();
        text += &table(&sizes, &[("bytes", "bytes"), ("live", "live"), ("free", "free")]);
    }
    text
}

/// Pieces that lie side by side in the order of addresses: first byte, bytes, whether live. Gaps between segments,
/// which are not the pool's, have no place.
fn pieces(map: &PoolMap) -> impl Iterator<Item = (usize, usize, bool)> {
    map.segments.iter().flat_map(|segment| &segment.pieces).scan(0, |at, piece| {
        let first = *at;
        *at += piece.bytes;
        Some((first, piece.bytes, piece.is_live))
    })
}

/// Bytes of a cell, and what each holds.
fn cells(map: &PoolMap) -> (usize, Vec<char>) {
    let total: usize = map.segments.iter().map(|segment| segment.bytes).sum();
    let bytes = total.div_ceil(CELLS.0 * CELLS.1).next_multiple_of(512).max(512);
    let mut live = vec![0; total.div_ceil(bytes)];
    for (first, size, _) in pieces(map).filter(|&(.., is_live)| is_live) {
        let (from, to) = (first / bytes, (first + size).div_ceil(bytes));
        for (cell, live) in (from..to).zip(&mut live[from..to]) {
            *live += (first + size).min((cell + 1) * bytes) - first.max(cell * bytes);
        }
    }
    let whole = |cell: usize| (total - cell * bytes).min(bytes);
    let sign = |(cell, live)| match live {
        0 => '.',
        live if live == whole(cell) => '#',
        _ => '+',
    };
    (bytes, live.into_iter().enumerate().map(sign).collect())
}

/// A picture of pools, each with its device's name: stripes of its pieces in the order of addresses.
pub fn svg(pools: &[(String, PoolMap)]) -> String {
    let (width, height, stripes) = STRIPES;
    let mut body = String::new();
    let mut top = 0.0;
    for (name, map) in pools {
        let total: usize = map.segments.iter().map(|segment| segment.bytes).sum();
        let stripe_bytes = total.div_ceil(stripes).max(1);
        let name = name.replace('&', "&amp;").replace('<', "&lt;");
        let (in_use, reserved) = (map.stats.in_use_bytes, map.stats.reserved_bytes);
        let _ = writeln!(
            body,
            r#"<text x="4" y="{:.0}">{name}: {in_use} of {reserved} bytes in use</text>"#,
            top + 16.0
        );
        top += 24.0;
        for (first, size, is_live) in pieces(map) {
            for stripe in first / stripe_bytes..(first + size).div_ceil(stripe_bytes) {
                let start = first.max(stripe * stripe_bytes) - stripe * stripe_bytes;
                let end = (first + size).min((stripe + 1) * stripe_bytes) - stripe * stripe_bytes;
                let scale = width / stripe_bytes as f64;
                let class = if is_live { "live" } else { "free" };
                let _ = writeln!(
                    body,
                    r#"<rect class="{class}" x="{:.2}" y="{:.0}" width="{:.2}" height="{:.0}"><title>{size} bytes, {class}</title></rect>"#,
                    start as f64 * scale,
                    top + stripe as f64 * height,
                    (end - start) as f64 * scale,
                    height - 2.0
                );
            }
        }
        top += total.div_ceil(stripe_bytes) as f64 * height + 8.0;
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{top:.0}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <style>rect {{ stroke: white; stroke-width: 0.5 }} .live {{ fill: #2b6cb0 }} .free {{ fill: #cbd5e0 }}</style>\n\
         {body}</svg>\n"
    )
}

#[cfg(test)]
mod tests {
    use warpforge::{DType, Device, Error, Tensor};

    use super::*;

    /// 4 KiB that are live, 8 that are free, 4 that are live: of which the picture has as much as the text.
    #[test]
    fn a_pool_in_text_and_picture() -> Result<(), Error> {
        let device = Device::cpu();
        let stream = device.stream()?;
        let of = |bytes: usize| Tensor::empty(&stream, &[bytes], DType::I8);
        let (_first, middle, _last) = (of(4096)?, of(8192)?, of(4096)?);
        drop(middle);
        let map = device.pool().map();
        let (bytes, cells) = cells(&map);
        assert_eq!((bytes, cells.len()), (512, 32));
        let count = |sign| cells.iter().filter(|&&cell| cell == sign).count();
        assert_eq!((count('#'), count('.'), count('+')), (16, 16, 0));
        let text = text(&map);
        assert!(
            text.contains("2 tensors live; 0 % of 3 allocations reused memory; fragmentation 0.00"),
            "{text}"
        );
        assert!(text.contains("a cell is 512 bytes"), "{text}");
        let facts = facts(&map);
        assert_eq!(facts["sizes"][1], json!({"bytes": 8192, "live": 0, "free": 1}));
        assert_eq!(
            (&facts["reserved_bytes"], &facts["segments"][0]["bytes"].is_u64()),
            (&json!(16384), &true)
        );

        let svg = svg(&[("a < b".into(), map), ("nothing".into(), Device::cpu().pool().map())]);
        assert!(svg.contains("a &lt; b: 8192 of 16384 bytes in use"), "{svg}");
        assert!(svg.contains("nothing: 0 of 0 bytes in use"), "{svg}");
        // Each stripe is full.
        let width = |line: &str| line.split_once(" width=\"")?.1.split('"').next()?.parse::<f64>().ok();
        let all: f64 = svg.lines().filter(|line| line.starts_with("<rect")).filter_map(width).sum();
        let stripes = STRIPES.0 * 16384.0 / 16384usize.div_ceil(STRIPES.2) as f64;
        assert!((all - stripes).abs() < 1.0, "{all} of {stripes}");
        Ok(())
    }

    #[test]
    fn a_pool_of_nothing() {
        let text = text(&Device::cpu().pool().map());
        assert!(text.contains("0 tensors live") && !text.contains("cell"), "{text}");
    }

    /// Pieces that share a cell.
    #[test]
    fn cells_in_part() -> Result<(), Error> {
        let device = Device::cpu();
        let stream = device.stream()?;
        let of = |bytes: usize| Tensor::empty(&stream, &[bytes], DType::I8);
        let whole = of(1 << 30)?;
        drop(whole);
        let _part = of((1 << 20) + 5)?;
        let (bytes, cells) = cells(&device.pool().map());
        assert_eq!((bytes % 512, cells[0], cells[1]), (0, '+', '.'));
        assert!(cells.len() <= CELLS.0 * CELLS.1);
        Ok(())
    }
}
