import { LabIcon } from '@jupyterlab/ui-components';

/** The icon: two parallel lines that join. */
export const accelIcon = new LabIcon({
  name: 'accel-nb:icon',
  svgstr:
    '<svg xmlns="http://www.w3.org/2000/svg" width="16" viewBox="0 0 24 24">' +
    '<path class="jp-icon3" fill="#616161" d="M3 5h7.2c3.2 0 4.6 2.2 5.6 4.4.5 1 .9 1.6 1.7 1.6H19V8l4 4-4 4v-3h-1.5' +
    'c-.8 0-1.2.6-1.7 1.6-1 2.2-2.4 4.4-5.6 4.4H3v-2h7.2c2 0 2.9-1.300 3.800-3.200.5-1 1-1.500 1.700-1.800' +
    '-.7-.3-1.200-.8-1.700-1.800C13.100 8.300 12.200 7 10.200 7H3z"/></svg>'
});
