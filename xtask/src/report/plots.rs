//! A record as SVG plots.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::markdown::ratios;
use super::record::{Case, Record};
use super::timeline::Step;
use crate::error::Error;

const FONT: &str = "sans-serif";
const OURS: RGBColor = RGBColor(0xd9, 0x48, 0x01);
const PEERS: RGBColor = RGBColor(0x31, 0x82, 0xbd);
/// TFLOP/s below which a point is left out: a single block's work, which says nothing of the card.
const SLOWEST: f64 = 1e-3;
const GREY: RGBColor = RGBColor(0x96, 0x96, 0x96);

/// Rate over operations per byte, both logarithmic: our cases and the fastest peers' under the card's roofline.
pub fn roofline(record: &Record, file: &Path) -> Result<(), Error> {
    draw(file, (960, 600), |area| {
        let points = |us: fn(&Case) -> Option<f64>| -> Vec<(f64, f64)> {
            let cases = record.cases.iter().filter(|case| case.work.flops > 0 && case.work.op != "model");
            cases
                .filter_map(|case| {
                    let (flops, bytes) = (case.work.flops as f64, case.work.bytes as f64);
                    Some((flops / bytes, flops / us(case)? * 1e-6)).filter(|&(_, rate)| rate > SLOWEST)
                })
                .collect()
        };
        let ours = points(|case| Some(case.ours.as_ref()?.us));
        let peers = points(|case| Some(case.best_peer()?.us));
        let (x, y) = (0.05..20_000.0, SLOWEST..3_000.0);
        let mut chart = ChartBuilder::on(area)
            .caption(format!("{}: rate over operations per byte", record.run.device), (FONT, 20))
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d(x.clone().log_scale(), y.clone().log_scale())?;
        chart
            .configure_mesh()
            .x_desc("operations per byte")
            .y_desc("TFLOP/s")
            .light_line_style(WHITE)
            .label_style((FONT, 13))
            .draw()?;
        let copy = record.run.roofline.copy_gb_per_s * 1e-3;
        let top = record.run.roofline.peaks.iter().map(|peak| peak.tflop_per_s).fold(1.0, f64::max);
        let slope = [x.start, top / copy].map(|intensity| (intensity, intensity * copy));
        chart.draw_series(LineSeries::new(slope, GREY.stroke_width(2)))?;
        for (index, peak) in record.run.roofline.peaks.iter().enumerate() {
            let rate = peak.tflop_per_s;
            chart.draw_series(LineSeries::new([(rate / copy, rate), (x.end, rate)], GREY.stroke_width(2)))?;
            // In a row above the highest line: the lines are close to each other.
            let place = (top / copy * 4_f64.powi(index as i32), top * 1.45);
            let label = format!("{} {rate:.0}", peak.dtype);
            chart.draw_series([Text::new(label, place, (FONT, 13).into_font().color(&GREY))])?;
        }
        for (name, colour, points) in [("fastest peer", PEERS, peers), ("warpforge", OURS, ours)] {
            let fill = colour.mix(0.7).filled();
            chart
                .draw_series(points.into_iter().map(|point| Circle::new(point, 3, fill)))?
                .label(name)
                .legend(move |(x, y)| Circle::new((x + 8, y), 4, fill));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .background_style(WHITE)
            .border_style(GREY)
            .label_font((FONT, 14))
            .draw()
    })
}

/// For each operator the geometric mean of the ratios to the fastest peers, with the least and the most.
pub fn ratio_bars(record: &Record, file: &Path) -> Result<(), Error> {
    let bars: Vec<_> = record
        .operators()
        .into_iter()
        .filter_map(|(op, cases)| Some((op.to_owned(), ratios(cases)?)))
        .collect();
    let height = 110 + 34 * bars.len() as u32;
    draw(file, (960, height), |area| {
        let least = bars.iter().map(|(_, ratio)| ratio.least).fold(0.5, f64::min);
        let most = bars.iter().map(|(_, ratio)| ratio.most).fold(2.0, f64::max);
        let (left, right_end) = (least * 0.8, most * 1.9);
        let rows = bars.len() as f64;
        let mut chart = ChartBuilder::on(area)
            .caption("the fastest peer's time over ours: geometric mean, least and most", (FONT, 20))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(150)
            // Room for the numbers to the right.
            .build_cartesian_2d((left..right_end).log_scale(), 0.0..rows.max(1.0))?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .disable_y_axis()
            .y_labels(0)
            .x_label_formatter(&|ratio| tick(*ratio))
            .x_desc("times as fast as the fastest peer")
            .light_line_style(WHITE)
            .label_style((FONT, 13))
            .draw()?;
        let right = TextStyle::from((FONT, 15).into_font()).pos(Pos::new(HPos::Right, VPos::Center));
        let row = |index: usize| rows - index as f64 - 0.5;
        for (index, (op, ratio)) in bars.iter().enumerate() {
            let y = row(index);
            let colour = if ratio.mean >= 1.0 { OURS } else { PEERS };
            chart.draw_series([Rectangle::new(
                [(1.0_f64, y - 0.3), (ratio.mean, y + 0.3)],
                colour.mix(0.7).filled(),
            )])?;
            chart.draw_series(LineSeries::new([(ratio.least, y), (ratio.most, y)], BLACK.stroke_width(1)))?;
            let label = format!("{:.2} ({} cases)", ratio.mean, ratio.count);
            chart.draw_series([Text::new(label, (ratio.most * 1.04, y + 0.15), (FONT, 13).into_font())])?;
            let name = Text::new(op.clone(), (-8, 0), right.clone());
            chart.draw_series([EmptyElement::at((left, y)) + name])?;
        }
        chart.draw_series(LineSeries::new([(1.0, 0.0), (1.0, rows)], BLACK.stroke_width(1)))?;
        Ok(())
    })
}

/// Ratios by row and column, which are named: worse than 1 in red, better in blue. Rows and columns stand as they come.
pub fn heat_map(title: &str, cells: &[((String, String), f64)], file: &Path) -> Result<(), Error> {
    const CELL: (i32, i32) = (30, 18);
    let (mut rows, mut cols) = (Vec::<&str>::new(), Vec::<&str>::new());
    for ((row, col), _) in cells {
        for (names, name) in [(&mut rows, row), (&mut cols, col)] {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
    }
    let longest = |names: &[&str]| names.iter().map(|name| name.len()).max().unwrap_or_default() as i32;
    let (left, top) = (7 * longest(&rows) + 16, 7 * longest(&cols) + 48);
    let size = (left + CELL.0 * cols.len() as i32 + 12, top + CELL.1 * rows.len() as i32 + 12);
    draw(file, (size.0.max(480) as u32, size.1 as u32), |area| {
        let font = (FONT, 11).into_font();
        area.draw(&Text::new(title.to_owned(), (8, 8), (FONT, 15)))?;
        let end = TextStyle::from(font.clone()).pos(Pos::new(HPos::Right, VPos::Center));
        for (index, row) in rows.iter().enumerate() {
            let y = top + CELL.1 * index as i32 + CELL.1 / 2;
            area.draw(&Text::new((*row).to_owned(), (left - 6, y), end.clone()))?;
        }
        let upwards =
            TextStyle::from(font.transform(FontTransform::Rotate270)).pos(Pos::new(HPos::Left, VPos::Center));
        for (index, col) in cols.iter().enumerate() {
            let x = left + CELL.0 * index as i32 + CELL.0 / 2;
            area.draw(&Text::new((*col).to_owned(), (x, top - 6), upwards.clone()))?;
        }
        let number = TextStyle::from((FONT, 10).into_font()).pos(Pos::new(HPos::Center, VPos::Center));
        for ((row, col), ratio) in cells {
            let at = |names: &[&str], name: &str| names.iter().position(|other| *other == name).unwrap_or(0);
            let (x, y) = (left + CELL.0 * at(&cols, col) as i32, top + CELL.1 * at(&rows, row) as i32);
            // Full colour at half of the peer's speed, and at twice.
            let strength = ratio.log2().abs().min(1.0);
            let colour = if *ratio < 1.0 { RGBColor(0xcb, 0x18, 0x1d) } else { PEERS };
            let cell = [(x, y), (x + CELL.0 - 1, y + CELL.1 - 1)];
            area.draw(&Rectangle::new(cell, colour.mix(strength).filled()))?;
            let middle = (x + CELL.0 / 2, y + CELL.1 / 2);
            area.draw(&Text::new(format!("{ratio:.2}"), middle, number.clone()))?;
        }
        Ok(())
    })
}

/// Colours of operators, in the order in which they are met.
const COLOURS: [RGBColor; 12] = [
    RGBColor(0x1f, 0x77, 0xb4),
    RGBColor(0xff, 0x7f, 0x0e),
    RGBColor(0x2c, 0xa0, 0x2c),
    RGBColor(0xd6, 0x27, 0x28),
    RGBColor(0x94, 0x67, 0xbd),
    RGBColor(0x8c, 0x56, 0x4b),
    RGBColor(0xe3, 0x77, 0xc2),
    RGBColor(0x17, 0xbe, 0xcf),
    RGBColor(0xbc, 0xbd, 0x22),
    RGBColor(0x7f, 0x7f, 0x7f),
    RGBColor(0x39, 0x3b, 0x79),
    RGBColor(0x63, 0x79, 0x39),
];

/// A step's launches one after the other: as wide as they took, as high as their rate of bytes, so that areas are
/// bytes. All of it above, and larger below what is in the middle: the launches of some two layers.
pub fn timeline(step: &Step, file: &Path) -> Result<(), Error> {
    const LARGER: usize = 30;
    let mut ops: Vec<&str> = Vec::new();
    for launch in &step.launches {
        if !ops.contains(&launch.op()) {
            ops.push(launch.op());
        }
    }
    let colour = |op: &str| COLOURS[ops.iter().position(|other| *other == op).unwrap_or(0) % COLOURS.len()];
    // Bytes of a nanosecond are GB/s.
    let rate = |ns: f64, bytes: f64| if ns > 0.0 { bytes / ns } else { 0.0 };
    let most = step.launches.iter().map(|launch| rate(launch.ns, launch.bytes)).fold(1.0, f64::max) * 1.05;
    let legend = 24 + 18 * ops.len() as u32;
    draw(file, (1400, 620 + legend), |area| {
        area.draw(&Text::new(step.title.clone(), (12, 8), (FONT, 18)))?;
        let (_, rest) = area.split_vertically(32);
        let (all, rest) = rest.split_vertically(290);
        let (middle, names) = rest.split_vertically(290);
        let first = (step.launches.len() / 2).saturating_sub(LARGER / 2);
        let part = &step.launches[first..(first + LARGER).min(step.launches.len())];
        for (area, launches) in [(&all, &step.launches[..]), (&middle, part)] {
            let total: f64 = launches.iter().map(|launch| launch.ns / 1e3).sum();
            let mut chart = ChartBuilder::on(area)
                .margin(8)
                .x_label_area_size(36)
                .y_label_area_size(56)
                .build_cartesian_2d(0.0..total.max(1e-3), 0.0..most)?;
            chart
                .configure_mesh()
                .x_desc("µs, one launch after the other")
                .y_desc("GB/s from and to memory")
                .light_line_style(WHITE)
                .label_style((FONT, 12))
                .draw()?;
            let mut from = 0.0;
            for launch in launches {
                let to = from + launch.ns / 1e3;
                // Its whole time is shown pale, also where it moves nothing.
                let own = colour(launch.op());
                let box_of = |top: f64| [(from, 0.0), (to, top)];
                chart.draw_series([Rectangle::new(box_of(most), own.mix(0.12).filled())])?;
                let top = rate(launch.ns, launch.bytes);
                chart.draw_series([Rectangle::new(box_of(top), own.mix(0.85).filled())])?;
                from = to;
            }
        }
        for (index, op) in ops.iter().enumerate() {
            let own = || step.launches.iter().filter(|launch| launch.op() == *op);
            let (ns, bytes) =
                own().fold((0.0, 0.0), |(ns, bytes), launch| (ns + launch.ns, bytes + launch.bytes));
            let y = 6 + 18 * index as i32;
            names.draw(&Rectangle::new([(64, y), (78, y + 12)], colour(op).filled()))?;
            let text = format!(
                "{op}: {} launches, {:.0} µs, {:.1} MB, {:.0} GB/s",
                own().count(),
                ns / 1e3,
                bytes / 1e6,
                rate(ns, bytes)
            );
            names.draw(&Text::new(text, (86, y), (FONT, 13)))?;
        }
        Ok(())
    })
}

/// A tick's number, only where the axis has room: 1, 2 and 5 times the powers of ten.
fn tick(ratio: f64) -> String {
    let digit = ratio / 10_f64.powf((ratio * 1.000_001).log10().floor());
    if [1.0, 2.0, 5.0].iter().any(|shown| (digit - shown).abs() < 1e-3) {
        // Without the digits that a sum of tenths has too many.
        ((ratio * 1e6).round() / 1e6).to_string()
    } else {
        String::new()
    }
}

type Svg<'a> = SVGBackend<'a>;
type Drawn<'a> = Result<(), DrawingAreaErrorKind<<Svg<'a> as DrawingBackend>::ErrorType>>;
fn draw<'a>(
    file: &'a Path,
    size: (u32, u32),
    work: impl FnOnce(&DrawingArea<Svg<'a>, Shift>) -> Drawn<'a>,
) -> Result<(), Error> {
    let failed = |reason: String| Error::Plot { path: file.into(), reason };
    let area = SVGBackend::new(file, size).into_drawing_area();
    area.fill(&WHITE).map_err(|error| failed(error.to_string()))?;
    work(&area).map_err(|error| failed(error.to_string()))?;
    area.present().map_err(|error| failed(error.to_string()))
}
